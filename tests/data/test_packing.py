"""Packing: every document once, no pack too full, an order made of seed and epoch, weights that sum to 1."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conf import InputError
from data.batch import PADDING
from data.encode import Document
from data.packing import answer_weights, collate, pack_documents

CAPACITY = 20


def document(ids, num_prompt):
    return Document(input_ids=ids, loss_mask=[i >= num_prompt for i in range(len(ids))], source="test")


@given(
    lengths=st.lists(st.integers(1, CAPACITY), min_size=1, max_size=150),
    seed=st.integers(0, 10),
    epoch=st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_every_document_is_in_exactly_one_pack_and_none_is_too_full(lengths, seed, epoch):
    packs = pack_documents(lengths, CAPACITY, seed, epoch)
    assert sorted(index for pack in packs for index in pack) == list(range(len(lengths)))
    assert all(0 < sum(lengths[index] for index in pack) <= CAPACITY for pack in packs)
    assert pack_documents(lengths, CAPACITY, seed, epoch) == packs


def test_order_changes_with_epoch_and_with_seed():
    lengths = [CAPACITY] * 30  # one document per pack: the packs are the order
    orders = [
        [pack[0] for pack in pack_documents(lengths, CAPACITY, seed, epoch)]
        for seed, epoch in ((0, 0), (0, 1), (1, 0), (1, 1))
    ]
    assert len({tuple(order) for order in orders}) == 4


def test_documents_that_divide_a_pack_leave_no_room():
    packs = pack_documents([5] * 40, CAPACITY, seed=3, epoch=0)
    assert [len(pack) for pack in packs] == [4] * 10


def test_document_goes_where_it_leaves_the_least_room(monkeypatch):
    monkeypatch.setattr(torch, "randperm", lambda n, generator: torch.arange(n))  # keep the order given here
    # 8 fits beside 11 and beside 12; only beside 12 does it leave room for 9.
    assert pack_documents([11, 12, 8, 9], CAPACITY, seed=0, epoch=0) == [[0, 3], [1, 2]]


def test_document_longer_than_a_pack_is_refused():
    with pytest.raises(InputError, match=r"21 tokens, more than data\.pack_tokens=20"):
        pack_documents([3, 21], CAPACITY, seed=0, epoch=0)


def test_collate_lays_out_documents_by_hand():
    first, second, third = document([7, 8, 9], 2), document([5, 6], 1), document([1, 2, 3, 4], 1)
    batch = collate([[first, second], [], [third]], 6, [[0.5, 0.25], [], [0.125]])
    assert batch.input_ids.tolist() == [[7, 8, 9, 5, 6, 0], [0] * 6, [1, 2, 3, 4, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0], [0] * 6, [0, 1, 2, 3, 0, 0]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 1, PADDING], [PADDING] * 6, [0] * 4 + [PADDING] * 2]
    assert batch.loss_mask.tolist() == [
        [False, False, True, False, True, False],
        [False] * 6,
        [False] + [True] * 3 + [False] * 2,
    ]
    assert batch.token_weights.tolist() == [[0, 0, 0.5, 0, 0.25, 0], [0.0] * 6, [0, 0.125, 0.125, 0.125, 0, 0]]
    assert batch.document_spans() == [(0, 3), (3, 5), (12, 16)]


def test_documents_of_neighbouring_packs_do_not_join_in_spans():
    full = document([1, 2, 3], 1)  # fills a pack; both have document id 0
    assert collate([[full], [full]], 3, [[0.0], [0.0]]).document_spans() == [(0, 3), (3, 6)]


def test_weights_by_hand():
    packs = [[document([1, 1, 1], 1), document([1, 1], 1)], [document([1, 1, 1, 1], 1)]]  # 2, 1 and 3 answer tokens
    assert answer_weights(packs, "token") == [[1 / 6, 1 / 6], [1 / 6]]
    assert answer_weights(packs, "sequence") == [[1 / 6, 1 / 3], [1 / 9]]


@pytest.mark.parametrize("normalisation", ["token", "sequence"])
@given(
    shapes=st.lists(
        st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6)), max_size=2), min_size=1, max_size=5
    ).filter(any)
)
@settings(max_examples=30, deadline=None)
def test_weights_of_a_global_batch_sum_to_one(normalisation, shapes):
    packs = [[document([1] * (prompt + answer), prompt) for prompt, answer in pack] for pack in shapes]
    batch = collate(packs, CAPACITY, answer_weights(packs, normalisation))
    assert batch.token_weights.double().sum().item() == pytest.approx(1, abs=1e-6)
    assert torch.equal(batch.token_weights > 0, batch.loss_mask)
