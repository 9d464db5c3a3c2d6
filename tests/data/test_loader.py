"""The training stream: the same global batch however it is cut, from seed and step number alone."""

import random

import pytest
import torch

from conf import InputError
from data.batch import PADDING
from data.encode import Document
from data.loader import DataConfig, TrainingStream

WIDTH = 16


@pytest.fixture(scope="module")
def documents():
    """40 documents; each starts with its own number, so that it can be told in a batch."""
    choose = random.Random(0)
    made = []
    for number in range(40):
        prompt, answer = choose.randint(1, 4), choose.randint(1, 8)
        ids = [1000 + number, *(choose.randrange(100) for _ in range(prompt + answer - 1))]
        made.append(Document(input_ids=ids, loss_mask=[i >= prompt for i in range(prompt + answer)], source="test"))
    return made


def stream(documents, micro=1, size=4, epochs=1.0, normalisation="token", packing=True, seed=5):
    data = DataConfig(
        max_tokens=WIDTH, packing=packing, pack_tokens=WIDTH, micro_batch_packs=micro, global_batch_packs=size,
        loss_normalisation=normalisation, feature_cache_gib=0.0, num_workers=0,
    )  # fmt: skip
    return TrainingStream(documents, data, seed=seed, epochs=epochs)


def of_all_ranks(source, step, world_size):
    return [part for rank in range(world_size) for part in source.micro_batches(step, rank, world_size)]


def rows(parts):
    """Each pack as (ids, weights), in an order of their own."""
    return sorted(
        (ids.tolist(), weights.tolist())
        for part in parts
        for ids, weights in zip(part.batch.input_ids, part.batch.token_weights, strict=True)
    )


def numbers(parts):
    """Numbers of the documents, read off the batch."""
    ids = torch.cat([part.batch.input_ids.flatten() for part in parts])
    return [token - 1000 for token in ids.tolist() if token >= 1000]


@pytest.mark.parametrize("normalisation", ["token", "sequence"])
@pytest.mark.parametrize(("world_size", "micro"), [(1, 2), (1, 4), (2, 1), (2, 2), (4, 1)])
def test_global_batch_does_not_depend_on_how_it_is_cut(documents, normalisation, world_size, micro):
    whole, cut = (
        stream(documents, 1, normalisation=normalisation),
        stream(documents, micro, normalisation=normalisation),
    )
    assert cut.total_steps == whole.total_steps > 3
    assert cut.accumulation_steps(world_size) == 4 // (world_size * micro)
    for step in range(whole.total_steps):
        parts = of_all_ranks(cut, step, world_size)
        assert len(parts) == 4 // micro and all(part.batch.input_ids.shape == (micro, WIDTH) for part in parts)
        assert rows(parts) == rows(of_all_ranks(whole, step, 1))
        total = sum(part.batch.token_weights.double().sum().item() for part in parts)
        assert total == pytest.approx(1, abs=1e-6)


def test_every_epoch_reads_every_document_once(documents):
    twice = stream(documents, size=1, epochs=2.0)
    read = [numbers(of_all_ranks(twice, step, 1)) for step in range(twice.total_steps)]
    half = next(i for i in range(len(read)) if sum(map(len, read[:i])) == 40)
    first, second = ([n for step in part for n in step] for part in (read[:half], read[half:]))
    assert sorted(first) == sorted(second) == list(range(40))
    assert first != second


def test_packs_name_the_documents_that_lie_in_the_batch(documents):
    for part in of_all_ranks(stream(documents, 2), 1, 2):
        assert [index for pack in part.packs for index in pack] == numbers([part])
        lengths = [len(documents[index]) for pack in part.packs for index in pack]
        assert [end - start for start, end in part.batch.document_spans()] == lengths


def test_last_step_is_filled_up_with_empty_packs(documents):
    source = stream(documents[:7], size=4, packing=False)  # 7 packs: 4 + 3
    assert source.total_steps == 2
    parts = of_all_ranks(source, 1, 2)
    empty = [part for part in parts if part.packs == [[]]]
    assert len(parts) == 4 and len(empty) == 1
    assert (empty[0].batch.document_ids == PADDING).all()
    assert sum(part.batch.token_weights.double().sum().item() for part in parts) == pytest.approx(1, abs=1e-6)


def test_trained_tokens_counts_what_the_batches_hold(documents):
    source = stream(documents)
    held = [
        sum(int((part.batch.document_ids != PADDING).sum()) for part in of_all_ranks(source, step, 1))
        for step in range(source.total_steps)
    ]
    assert [source.trained_tokens(steps) for steps in range(source.total_steps + 1)] == [
        sum(held[:steps]) for steps in range(source.total_steps + 1)
    ]
    assert sum(held) == sum(map(len, documents))


@pytest.mark.parametrize(("micro", "world_size"), [(3, 1), (1, 3), (2, 4)])
def test_global_batch_that_does_not_divide_is_refused(documents, micro, world_size):
    with pytest.raises(InputError, match=rf"global_batch_packs=4 must be a multiple .*= {micro} x {world_size}"):
        stream(documents, micro).micro_batches(0, 0, world_size)


def test_step_is_a_function_of_its_arguments(documents):
    jumped = rows(stream(documents, size=1).micro_batches(7, 0, 1))
    source = stream(documents, size=1)
    in_order = [rows(source.micro_batches(step, 0, 1)) for step in range(8)]
    assert in_order[7] == jumped
    assert jumped != in_order[6]
    assert rows(stream(documents, size=1, seed=6).micro_batches(7, 0, 1)) != jumped


def test_fraction_of_an_epoch_ends_within_it(documents):
    whole, part = stream(documents, size=1, packing=False), stream(documents, size=1, epochs=1.25, packing=False)
    assert (whole.total_steps, part.total_steps) == (40, 50)
    for step in range(40):
        assert rows(part.micro_batches(step, 0, 1)) == rows(whole.micro_batches(step, 0, 1))


def test_without_packing_each_document_has_its_own_pack(documents):
    source = stream(documents, packing=False)
    assert all(len(pack) <= 1 for step in range(10) for part in of_all_ranks(source, step, 1) for pack in part.packs)
    assert sorted(n for step in range(10) for n in numbers(of_all_ranks(source, step, 1))) == list(range(40))


def uniforms_of(source):
    """(document, visit) -> its random numbers."""
    found, visits = {}, {}
    for step in range(source.total_steps):
        for part in source.micro_batches(step, 0, 1):
            ids, draws = part.batch.input_ids.flatten(), part.batch.uniforms.flatten()
            for start, end in part.batch.document_spans():
                number = int(ids[start]) - 1000
                visits[number] = visits.get(number, 0) + 1
                found[number, visits[number]] = draws[start:end].tolist()
    return found


def test_random_numbers_belong_to_document_and_epoch_however_the_batch_is_cut(documents):
    packed = uniforms_of(stream(documents, epochs=2.0))
    assert (
        packed
        == uniforms_of(stream(documents, packing=False, epochs=2.0))
        == uniforms_of(stream(documents, 2, epochs=2.0))
    )
    draws = [draw for run in packed.values() for draw in run]
    assert len(set(draws)) > 0.99 * len(draws) and all(0 <= draw < 1 for draw in draws)  # documents and epochs differ
    assert sum(draws) / len(draws) == pytest.approx(0.5, abs=5 / (12 * len(draws)) ** 0.5)
    assert uniforms_of(stream(documents, seed=6)) != packed
