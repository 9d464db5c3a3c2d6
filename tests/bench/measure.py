"""Time and peak memory of a training step. Needs nothing but torch: the peers' processes use it too."""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

# SmolLM2-135M
HIDDEN, AUX_LAYERS, VOCAB = 576, 3, 49152
AUX_LAYER_IDS = (2, 15, 27)


def arguments() -> argparse.Namespace:
    """Shape of a step, and the target's folder."""
    parser = argparse.ArgumentParser()
    for name in ("target", "dtype"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("tokens", "ttt-steps", "draft-vocab", "repeats"):
        parser.add_argument(f"--{name}", type=int, required=True)
    chosen = parser.parse_args()
    torch.manual_seed(0)
    return chosen


def features(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids (T,), auxiliary states (T, A * D) and last hidden states (T, D) of one document."""
    ids = torch.randint(0, VOCAB, (tokens,))
    aux = torch.randn(tokens, AUX_LAYERS * HIDDEN).bfloat16()
    return ids, aux, torch.randn(tokens, HIDDEN).bfloat16()


def draft_ids(draft_vocab: int) -> torch.Tensor:
    """(Vd,) ascending ids."""
    return torch.randperm(VOCAB)[:draft_vocab].sort().values


def measure(step: Callable[[], None], repeats: int) -> None:
    """Print seconds of each step, and by how much the first one raised the process's peak memory.

    The first step makes gradients and optimizer states, so these are in. Memory: the high-water mark of the resident
    set, set back just before, minus the resident set then.
    """
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    step()
    peak = _status("VmHWM") - before
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    print(json.dumps({"seconds": statistics.median(seconds), "fastest": min(seconds), "peak_mib": peak / 1024}))


def _status(key: str) -> int:
    """KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1])
