"""`make bench`: a training step of EAGLE-3 beside the peers' own code, on the same shapes. Ratios of alternating runs.

Every figure comes from a process of its own; the sides take turns, A B C A B C. Writes outputs/bench/summary.json:

    matmul_gflops   measured rate of this machine at the drafter's shapes, by dtype
    shapes          for each shape and side: positions per second (median over the turns), peak MiB of the first step
    speed_ratio     ours over the faster peer, with the extremes over the turns
    memory_ratio    ours over the leaner peer
    mfu             ours: FLOPs of the step / (seconds * matmul rate)
"""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from conf.records import provenance, write_json
from data.wheel_target import smollm2_folder

HERE = Path(__file__).parent
OUTPUT = Path("outputs/bench/summary.json")
PEERS_PYTHON = ".venv-peers/bin/python"
SIDES = {
    "ours": (sys.executable, HERE / "step.py"),
    "speculators": (PEERS_PYTHON, HERE / "peers" / "speculators_step.py"),
    "specforge": (PEERS_PYTHON, HERE / "peers" / "specforge_step.py"),
}
SHAPES = [(tokens, steps, 8192, "bfloat16") for tokens in (1024, 2048) for steps in (3, 7)] + [
    (1024, 3, 8192, "float32"), (1024, 3, 49152, "bfloat16"),
]  # fmt: skip
TURNS, REPEATS = 3, 3


def run(side: str, tokens: int, steps: int, vocab: int, dtype: str) -> dict[str, float]:
    """One process of one side."""
    python, script = SIDES[side]
    command = [
        str(python), str(script), f"--target={smollm2_folder()}", f"--dtype={dtype}", f"--tokens={tokens}",
        f"--ttt-steps={steps}", f"--draft-vocab={vocab}", f"--repeats={REPEATS}",
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": f"{HERE}:." if side != "ours" else ".", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{side} failed:\n{done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def matmul_gflops(dtype: torch.dtype) -> float:
    """Best of several (2048 x 576) @ (576 x 1536) products."""
    a, b = torch.randn(2048, 576, dtype=dtype), torch.randn(1536, 576, dtype=dtype)
    best = float("inf")
    for _ in range(30):
        started = time.perf_counter()
        torch.nn.functional.linear(a, b)
        best = min(best, time.perf_counter() - started)
    return 2 * 2048 * 576 * 1536 / best / 1e9


def step_flops(tokens: int, steps: int, vocab: int) -> float:
    """Matrix products of a step on SmolLM2's shapes, every row in every step; attention within one document.

    Layer and fc: 2 FLOPs per weight and row forward, 4 backward. LM head (frozen): forward and input gradient.
    Teacher: forward, once for all steps. Attention: forward 2 products of half a square, backward 5.
    """
    width, inner, key_value = 576, 1536, 192
    layer = 2 * width * (width + 2 * key_value) + width * width + 3 * width * inner
    per_row = 6 * (3 * width * width) + steps * (6 * layer + 4 * width * vocab) + 2 * width * vocab
    attention = steps * 7 * 2 * width * tokens / 2
    return tokens * (per_row + attention)


def main() -> None:
    rates = {name: matmul_gflops(getattr(torch, name)) for name in ("bfloat16", "float32")}
    summary: dict[str, Any] = {"matmul_gflops": rates, "shapes": {}, "speed_ratio": {}, "memory_ratio": {}, "mfu": {}}
    for tokens, steps, vocab, dtype in SHAPES:
        name = f"T={tokens} S={steps} Vd={vocab} {dtype}"
        turns = [{side: run(side, tokens, steps, vocab, dtype) for side in SIDES} for _ in range(TURNS)]
        sides = {
            side: {
                "positions_per_second": tokens / statistics.median(turn[side]["seconds"] for turn in turns),
                "peak_mib": statistics.median(turn[side]["peak_mib"] for turn in turns),
            }
            for side in SIDES
        }
        peers = [side for side in SIDES if side != "ours"]
        faster = max(peers, key=lambda side: sides[side]["positions_per_second"])
        ratios = [turn[faster]["seconds"] / turn["ours"]["seconds"] for turn in turns]
        summary["shapes"][name] = sides
        summary["speed_ratio"][name] = {
            "peer": faster, "ratio": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)
        }  # fmt: skip
        leaner = min(peers, key=lambda side: sides[side]["peak_mib"])
        summary["memory_ratio"][name] = {
            "peer": leaner, "ratio": sides["ours"]["peak_mib"] / sides[leaner]["peak_mib"]
        }  # fmt: skip
        seconds = statistics.median(turn["ours"]["seconds"] for turn in turns)
        summary["mfu"][name] = step_flops(tokens, steps, vocab) / seconds / 1e9 / rates[dtype]
        print(name, json.dumps({key: summary[key][name] for key in ("shapes", "speed_ratio", "memory_ratio", "mfu")}))
    write_json(OUTPUT, summary | {"provenance": provenance()})
    print(f"written to {OUTPUT}")


if __name__ == "__main__":
    main()
