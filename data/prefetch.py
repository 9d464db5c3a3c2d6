"""Micro-batches with their features, one optimizer step ahead of the drafter.

Worker processes collate the batches, where some are asked for. The features of the next step are launched before the
drafter gets the current one: on a GPU in a stream of their own, so that target and drafter run side by side; a CPU
computes them at once, and only the order differs.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.utils.data import DataLoader, Dataset

from data.batch import Batch, TargetFeatures
from data.features import FeatureStore
from data.loader import MicroBatch, TrainingStream

PreparedStep = list[tuple[Batch, TargetFeatures]]
"""One rank's part of an optimizer step: micro-batches on the target's device, with their features."""


class _Steps(Dataset[list[MicroBatch]]):
    """Step number (0-based) -> this rank's micro-batches."""

    def __init__(self, stream: TrainingStream, rank: int, world_size: int) -> None:
        self.stream, self.rank, self.world_size = stream, rank, world_size

    def __getitem__(self, step: int) -> list[MicroBatch]:
        return self.stream.micro_batches(step, self.rank, self.world_size)


def prepared_steps(
    stream: TrainingStream, store: FeatureStore, first_step: int, rank: int, world_size: int
) -> Iterator[PreparedStep]:
    """This rank's steps from `first_step` (0-based) to the end of the run."""
    device = store.target.device
    beside = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    loader = DataLoader(
        _Steps(stream, rank, world_size),
        batch_size=None,
        sampler=range(first_step, stream.total_steps),
        num_workers=stream.data.num_workers,
    )
    ahead: PreparedStep | None = None
    for micro_batches in loader:
        with torch.cuda.stream(beside):  # does nothing for None
            following = _prepare(micro_batches, store)
        if ahead is not None:
            yield ahead
        if beside is not None:
            _hand_over(following, beside)
        ahead = following
    if ahead is not None:
        yield ahead


def _prepare(micro_batches: list[MicroBatch], store: FeatureStore) -> PreparedStep:
    moved = [replace(part, batch=part.batch.to(store.target.device)) for part in micro_batches]  # once, for both
    return [(part.batch, store.features(part)) for part in moved]


def _hand_over(step: PreparedStep, beside: torch.cuda.Stream) -> None:
    """Let the current stream, which will use the step, wait for what `beside` still does for it."""
    current = torch.cuda.current_stream()
    current.wait_stream(beside)
    for part in (part for pair in step for part in pair):
        for tensor in vars(part).values():
            if tensor is not None:
                tensor.record_stream(current)
