"""Steps prepared ahead: the same as made on the spot, one step before they are asked for."""

import dataclasses

import pytest
import torch

from data.batch import Wants
from data.encode import Document
from data.features import FeatureStore
from data.loader import DataConfig, TrainingStream
from data.prefetch import prepared_steps

WANTS = Wants((1, 4), True)


def stream_of(num_workers=0, epochs=1.0):
    generator = torch.Generator().manual_seed(0)
    documents = [
        Document(torch.randint(0, 256, (n,), generator=generator).tolist(), [i > 1 for i in range(n)], "test")
        for n in 3 * (5, 9, 3, 8, 7, 4, 6, 9, 5, 3)
    ]
    data = DataConfig(
        max_tokens=16, packing=True, pack_tokens=16, micro_batch_packs=1, global_batch_packs=2,
        loss_normalisation="token", feature_cache_gib=1.0, num_workers=num_workers,
    )  # fmt: skip
    return TrainingStream(documents, data, seed=3, epochs=epochs)


@pytest.mark.parametrize("first_step", [0, 2])
@pytest.mark.parametrize(("num_workers", "epochs"), [(0, 1.0), (2, 1.0), (0, 2.0)])
def test_prepared_steps_are_those_of_the_stream(tiny_target, num_workers, epochs, first_step):
    target, stream = tiny_target("llama"), stream_of(num_workers, epochs)
    assert stream.total_steps > 2
    prepared = list(prepared_steps(stream, FeatureStore(target, WANTS, stream), first_step, 0, 1))
    assert len(prepared) == stream.total_steps - first_step
    store = FeatureStore(target, WANTS, stream)
    for step, ready in enumerate(prepared, start=first_step):
        expected = stream.micro_batches(step, 0, 1)
        assert len(ready) == len(expected) == 2
        for (batch, features), micro_batch in zip(ready, expected, strict=True):
            for field in dataclasses.fields(batch):
                assert torch.equal(getattr(batch, field.name), getattr(micro_batch.batch, field.name))
            inside = micro_batch.batch.document_ids >= 0  # rows of padding hold anything
            on_the_spot = store.features(micro_batch)
            assert torch.equal(features.aux_hidden_states[inside], on_the_spot.aux_hidden_states[inside])
            assert torch.equal(features.last_hidden_state[inside], on_the_spot.last_hidden_state[inside])


def test_features_are_launched_before_the_step_before_is_handed_out(tiny_target, monkeypatch):
    """What lets a GPU run target and drafter side by side."""
    target, stream = tiny_target("llama"), stream_of()
    events = []
    capture = target.capture
    monkeypatch.setattr(target, "capture", lambda *given: events.append("capture") or capture(*given))
    for _ in prepared_steps(stream, FeatureStore(target, WANTS, stream), 0, 0, 1):
        events.append("train")
    per_step = ["capture"] * 2
    expected = per_step + [*per_step, "train"] * (stream.total_steps - 1) + ["train"]
    assert events == expected
