"""Alignment: which row of a chain drafter predicts which token (by hand, and against the rule written as loops), and
that no row reads what it may not: the leak tests run EAGLE-3 on changed text and features.
"""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batch import PADDING, Batch, TargetFeatures
from train.drafters.rows import LABEL_OFFSET, answer_run_lengths, chain_labels, shifted_ids


def batch_of(*packs):
    """Each pack is a list of documents, each a string: lower case = prompt, upper case = the target's own tokens."""
    width = max(sum(map(len, pack)) for pack in packs)
    texts = ["".join(pack).ljust(width, ".") for pack in packs]
    owners = [[d for d, document in enumerate(pack) for _ in document] for pack in packs]
    owners = [row + [PADDING] * (width - len(row)) for row in owners]
    positions = [[i for document in pack for i in range(len(document))] for pack in packs]
    return Batch(
        input_ids=torch.tensor([[ord(letter) for letter in text] for text in texts]),
        position_ids=torch.tensor([row + [0] * (width - len(row)) for row in positions]),
        document_ids=torch.tensor(owners),
        loss_mask=torch.tensor([[letter.isupper() for letter in text] for text in texts]),
        token_weights=torch.zeros(len(packs), width),
        uniforms=torch.rand(len(packs), width, generator=torch.Generator().manual_seed(0)),
    )


def pairs(batch, step, num_steps=3):
    """[(row, predicted token)] of one step."""
    labels = chain_labels(batch, num_steps)
    return list(zip(labels.rows(step).tolist(), labels.label[labels.taught[step]].tolist(), strict=True))


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        # prompt a b (rows 0, 1), answer C D E F (rows 2..5), F ends the turn
        (0, [(1, 3), (2, 4), (3, 5)]),  # row 1 is the last of the prompt: the first draft of the turn
        (1, [(1, 4), (2, 5)]),
        (2, [(1, 5)]),
    ],
)
def test_six_token_toy_by_hand(step, expected):
    assert pairs(batch_of(["abCDEF"]), step) == expected


def test_example_of_the_docstring():
    batch = batch_of(["abCDE"])
    assert [pairs(batch, step) for step in range(3)] == [[(1, 3), (2, 4)], [(1, 4)], []]


def test_first_draft_of_every_turn_and_its_end_of_turn_are_trained():
    # SpecForge #885: an unshifted mask loses the rows before each answer (2 and 7).
    batch = batch_of(["abcDEFghIJKL"])
    assert pairs(batch, 0) == [(2, 4), (3, 5), (7, 9), (8, 10), (9, 11)]
    assert pairs(batch, 1) == [(2, 5), (7, 10), (8, 11)]
    assert pairs(batch, 2) == [(7, 11)]


def test_answers_of_one_document_do_not_join_across_a_prompt():
    assert pairs(batch_of(["aBCdEF"]), 0) == [(0, 2), (3, 5)]
    assert pairs(batch_of(["aBCdEF"]), 1) == []


def test_answer_of_one_token_teaches_nothing():
    labels = chain_labels(batch_of(["abC"]), 3)
    assert labels.label.tolist() == [] and [labels.rows(step).tolist() for step in range(3)] == [[], [], []]


def test_supervised_tokens_on_both_sides_of_a_border_do_not_join():
    batch = batch_of(["aBC", "DEFg"], ["hIJ", "kL.."])
    assert answer_run_lengths(batch).tolist() == [[0, 1, 2, 1, 2, 3, 0], [0, 1, 2, 0, 1, 0, 0]]
    assert 3 not in [label for step in range(3) for _, label in pairs(batch, step)]  # D follows C in no document
    assert (1, 3) not in pairs(batch, 0) and (1, 4) not in pairs(batch, 1)


def test_no_row_of_another_document_predicts_a_token():
    # D, E, F open a document: F may be predicted from D's row, E only from C's, which is another document's.
    assert pairs(batch_of(["aBC", "DEFg"]), 0) == [(0, 2), (3, 5)]


def test_neighbouring_packs_do_not_join():
    batch = batch_of(["abC"], ["DEf"], ["gHI"])
    assert answer_run_lengths(batch).tolist() == [[0, 0, 1], [1, 2, 0], [0, 1, 2]]
    assert pairs(batch_of(["aBC"], ["dEF"]), 0) == [(0, 2), (3, 5)]


@pytest.mark.parametrize(("num_steps", "expected"), [(2, [4, 3]), (9, [4, 3, 2, 1, 0, 0, 0, 0, 0])])
def test_each_step_has_one_row_less_per_answer(num_steps, expected):
    assert [len(taught) for taught in chain_labels(batch_of(["aBCDEF"]), num_steps).taught] == expected


def test_kept_rows_are_those_of_small_uniforms_and_go_on_from_kept_rows():
    batch = batch_of(["aBCDEFGH", "iJKLMNOP"])
    whole, kept = chain_labels(batch, 3), chain_labels(batch, 3, keep_ratio=0.5)
    uniforms = batch.uniforms.flatten()
    for step in range(3):
        expected = [row for row in whole.rows(step).tolist() if uniforms[row] < 0.5**step]
        assert kept.rows(step).tolist() == expected
        assert set(expected) <= set(kept.rows(max(step - 1, 0)).tolist())
    assert 0 < len(kept.rows(2)) < len(kept.rows(1)) < len(kept.rows(0)) == len(whole.rows(0))


def test_shifted_ids_by_hand():
    batch = batch_of(["abCD"], ["eFGH"])
    assert "".join(map(chr, shifted_ids(batch, 1).tolist())) == "bCDaFGHe"  # the last of each pack does not count
    assert "".join(map(chr, shifted_ids(batch, 3).tolist())) == "DabCHeFG"


answers = st.tuples(st.integers(1, 3), st.integers(1, 5)).map(lambda sizes: "p" * sizes[0] + "A" * sizes[1])
documents = st.lists(answers, min_size=1, max_size=3).map("".join)


@given(packs=st.lists(st.lists(documents, max_size=3), min_size=1, max_size=3).filter(any), num_steps=st.integers(1, 4))
@settings(max_examples=80, deadline=None)
def test_labels_are_those_of_the_rule(packs, num_steps):
    """Row t counts at step k iff x_{t+1}, ..., x_{t+2+k} all belong to one answer (of t's document)."""
    batch = batch_of(*packs)
    width = batch.input_ids.shape[1]
    for step in range(num_steps):
        expected = []
        for number, pack in enumerate(packs):
            start = number * width
            for document in pack:
                for row in range(len(document)):
                    needed = document[row + 1 : row + LABEL_OFFSET + step + 1]
                    if needed == "A" * (step + 2):
                        expected.append((start + row, start + row + 2 + step))
                start += len(document)
        assert pairs(batch, step, num_steps) == expected


def features_of(batch, seed):
    generator = torch.Generator().manual_seed(seed)
    aux = torch.randn(*batch.input_ids.shape, 96, generator=generator, dtype=torch.float64)
    return TargetFeatures(aux, last_hidden_state=None)


def changed(batch, features, columns):
    """Other tokens and other features in `columns` of every pack."""
    ids, aux = batch.input_ids.clone(), features.aux_hidden_states.clone()
    ids[:, columns] += 1
    aux[:, columns] = features_of(batch, seed=77).aux_hidden_states[:, columns]
    return dataclasses.replace(batch, input_ids=ids), TargetFeatures(aux, None)


def logits_of(drafter, batch, features):
    """(3, R, V): every draft of three steps, on the text's own tokens."""
    with torch.no_grad():
        everywhere = [torch.arange(batch.input_ids.numel())] * 3
        streams = drafter._unroll(batch, features, everywhere)
        return torch.stack([drafter.lm_head(drafter.norm(stream)) for stream in streams])


def test_no_draft_depends_on_text_that_is_not_yet_there(tiny_target, tiny_drafter):
    """Step k of row t has read x_{t+1+k} and features up to row t, nothing later."""
    drafter = tiny_drafter(tiny_target("llama", torch.float64))
    batch = batch_of(["ppAAA", "ppAAAAAA", "pA"])
    features, start, end = features_of(batch, seed=0), 5, 13  # the second document
    before = logits_of(drafter, batch, features)
    for j in range(start + 1, end):
        after = logits_of(drafter, *changed(batch, features, slice(j, end)))
        for step in range(3):
            for row in range(start, j):
                same = torch.equal(before[step, row], after[step, row])
                if row + 1 + step < j:
                    assert same
                elif row + 1 + step == j:
                    assert not same  # this draft does read x_j


@pytest.mark.parametrize(
    "columns", [range(5), range(11, 18), [*range(5), *range(11, 18)]], ids=["before", "after", "all"]
)
def test_no_draft_depends_on_another_document_or_on_padding(tiny_target, tiny_drafter, columns):
    drafter = tiny_drafter(tiny_target("llama", torch.float64))
    batch = batch_of(["ppAAA", "ppAAAA", "pAAAA", ""], ["p" * 18])  # columns 0..4, 5..10, 11..15, padding 16..17
    features = features_of(batch, seed=0)
    before = logits_of(drafter, batch, features)
    after = logits_of(drafter, *changed(batch, features, list(columns)))
    for step in range(3):
        assert torch.equal(before[step, 5 : 10 - step], after[step, 5 : 10 - step])  # rows whose x_{t+1+k} exists
        assert not torch.equal(before[step, columns[0]], after[step, columns[0]])


def test_no_draft_depends_on_another_pack(tiny_target, tiny_drafter):
    drafter = tiny_drafter(tiny_target("llama", torch.float64))
    batch = batch_of(["ppAAAA"], ["pAAAAA"])
    features = features_of(batch, seed=0)
    other, other_features = changed(batch, features, slice(0, 6))
    ids = torch.stack([other.input_ids[0], batch.input_ids[1]])
    aux = torch.stack([other_features.aux_hidden_states[0], features.aux_hidden_states[1]])
    before = logits_of(drafter, batch, features)
    after = logits_of(drafter, dataclasses.replace(batch, input_ids=ids), TargetFeatures(aux, None))
    assert torch.equal(before[:, 6:], after[:, 6:])
    assert not torch.equal(before[:, :6], after[:, :6])
