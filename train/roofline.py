"""How close a step comes to the machine's limit.

Model FLOPs utilisation (PaLM, arXiv:2204.02311, appendix B) = FLOPs that the step's formulas need / (seconds * rate),
where the rate is not a data sheet's but what one large matrix product reaches on this machine, in the run's precision.
"""

import time
from dataclasses import dataclass, fields
from typing import Any, Self

import torch

PROBE_SECONDS = 0.3
"""Long enough for a few dozen products on a CPU, and for a GPU to raise its clock."""


def matmul_flops_per_second(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> float:
    """The best of several products of a feed-forward layer's shape.

    Args:
        device: where.
        dtype: of both factors.
        rows: tokens of a micro-batch.
        width: hidden size; the layer is four times as wide.

    Returns:
        FLOP/s.
    """
    left = torch.randn(rows, width, device=device, dtype=dtype)
    weight = torch.randn(4 * width, width, device=device, dtype=dtype)
    best, begin = float("inf"), time.perf_counter()
    while time.perf_counter() - begin < PROBE_SECONDS:
        synchronize(device)
        started = time.perf_counter()
        torch.nn.functional.linear(left, weight)
        synchronize(device)
        best = min(best, time.perf_counter() - started)
    return 2 * rows * weight.numel() / best


def synchronize(device: torch.device) -> None:
    """Wait for what was launched on `device`; a CPU has done it already."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class Tally:
    """Figures that add up, field by field."""

    def add(self, other: Self) -> None:
        """Count `other` in."""
        for part in fields(self):
            setattr(self, part.name, getattr(self, part.name) + getattr(other, part.name))


@dataclass
class Usage(Tally):
    """What some steps took, and what the drafter's part of them needed."""

    seconds: float = 0.0
    feature_seconds: float = 0.0
    """Spent on the target's features, and on batches; on a GPU, whose stream runs beside, on launching them."""
    drafter_seconds: float = 0.0
    flops: int = 0
    """Of the drafter's training, by its own formula."""

    def report(self, matmul_rate: float) -> dict[str, Any]:
        """Model FLOPs utilisation of the drafter's part at `matmul_rate` FLOP/s, and each part's share of the time."""
        features, drafter = self.feature_seconds / self.seconds, self.drafter_seconds / self.seconds
        return {
            "mfu": self.flops / (self.drafter_seconds * matmul_rate),
            "time_share": {"features": features, "drafter": drafter, "other": 1 - features - drafter},
        }
