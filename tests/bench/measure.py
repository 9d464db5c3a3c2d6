"""Time and peak memory of a training step. Needs nothing but torch: the peers' processes use it too."""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

AUX_LAYER_IDS = (2, 15, 27)
SMOLLM2_HIDDEN, SMOLLM2_VOCAB = 576, 49152


def arguments() -> argparse.Namespace:
    """Shape of a step."""
    parser = argparse.ArgumentParser()
    for name in ("model", "dtype"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("tokens", "ttt-steps", "draft-vocab", "repeats"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--supervised", type=float, required=True, help="share of supervised tokens")
    parser.add_argument("--row-keep-ratio", type=float, default=1.0, help="ours only")
    parser.add_argument("--document", type=int, default=None, help="tokens of a document; all by default; ours only")
    parser.add_argument("--packs", type=int, default=1, help="packs of so many tokens; ours only")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    return chosen


def features(
    tokens: int, hidden: int = SMOLLM2_HIDDEN, vocab: int = SMOLLM2_VOCAB
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids (T,), auxiliary states (T, A * D) and last hidden states (T, D), noise."""
    ids = torch.randint(0, vocab, (tokens,))
    aux = torch.randn(tokens, len(AUX_LAYER_IDS) * hidden).bfloat16()
    return ids, aux, torch.randn(tokens, hidden).bfloat16()


def draft_ids(draft_vocab: int, vocab: int = SMOLLM2_VOCAB) -> torch.Tensor:
    """(Vd,) ascending ids."""
    return torch.randperm(vocab)[:draft_vocab].sort().values


def loss_mask(tokens: int, supervised: float) -> torch.Tensor:
    """(T,) bool: a prompt, then the answer."""
    return torch.arange(tokens) >= round(tokens * (1 - supervised))


def measure(step: Callable[[], object], repeats: int, flops: float = 0.0, rate: float = 1.0) -> None:
    """Print seconds of each step, by how much the first one raised the process's peak memory, and the utilisation.

    The first step makes gradients and optimizer states, so these are in.
    """
    gpu = torch.cuda.is_available()
    peak = peak_growth(step)
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        step()
        if gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    typical = statistics.median(seconds)
    found = {"seconds": typical, "fastest": min(seconds), "peak_mib": peak / 2**20, "mfu": flops / typical / rate}
    print(json.dumps(found))


def peak_growth(step: Callable[[], object]) -> int:
    """By how many bytes `step` raises the memory in use at its highest.

    On a CPU: the high-water mark of the resident set, set back just before, minus the resident set then; on a GPU: the
    same of torch's allocator.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    step()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    """Bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])
