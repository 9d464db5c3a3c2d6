"""`make bench`: a training step of EAGLE-3 beside the peers' own code, on the same work. Ratios of alternating runs.

Every figure comes from a process of its own; the sides take turns, A B C D A B C D. All train the same rows of the same
shape, with the corpus's share of supervised tokens, AdamW and equal weights for all steps; `ours, sampled rows` is what
our demo does besides (drafter.row_keep_ratio: later steps on a random part of the rows, unbiased). Then how time and
memory grow with the length of packs and of documents, all of 16k tokens a step. Writes outputs/bench/summary.json:

    shapes         for each shape and side: positions per second (median over the turns), peak MiB of the first step
    speed_ratio    for each shape and peer: ours over the peer, with the extremes over the turns
    memory_ratio   for each shape and peer: ours over the peer
    mfu            for each shape, ours: FLOPs that the step's formulas need / (seconds * measured matmul rate)
    scaling        microseconds per token, peak MiB and MFU by pack length and by document length
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from conf.records import provenance, write_json
from data.wheel_target import smollm2_folder

HERE = Path(__file__).parent
OUTPUT = Path("outputs/bench")
SUPERVISED = 0.8
"""Share of the tokens of corpus/sample.yaml that SmolLM2 wrote itself: 162k of 203k."""
DEMO_KEEP_RATIO = 0.35
PEERS = ("speculators", "specforge")
SIDES = ("ours", "ours, sampled rows", *PEERS)
SHAPES = [(tokens, steps, 8192, "bfloat16") for tokens in (1024, 2048) for steps in (3, 7)] + [
    (1024, 3, 8192, "float32"), (1024, 3, 49152, "bfloat16"),
]  # fmt: skip
TURNS, REPEATS = 2, 2
STEP_TOKENS = 16384
LENGTHS = (1024, 2048, 4096, 8192, 16384)


def run_ours(*options: str, model: str = "smollm2") -> dict[str, float]:
    """One process of ours."""
    return _run([sys.executable, "-m", "tests.bench.step", f"--model={model}", *options], ".")


def run_peer(peer: str, *options: str) -> dict[str, float]:
    """One process of a peer, in the peers' environment."""
    script = HERE / "peers" / f"{peer}_step.py"
    return _run([".venv-peers/bin/python", str(script), f"--model={smollm2_folder()}", *options], str(HERE))


def _run(command: Sequence[str], path: str) -> dict[str, float]:
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def options(tokens: int, steps: int, vocab: int, dtype: str, repeats: int) -> list[str]:
    """What all sides are told."""
    return [
        f"--tokens={tokens}", f"--ttt-steps={steps}", f"--draft-vocab={vocab}", f"--dtype={dtype}",
        f"--repeats={repeats}", f"--supervised={SUPERVISED}",
    ]  # fmt: skip


def compare(shape: tuple[int, int, int, str]) -> dict[str, Any]:
    """All sides on one shape."""
    shared = options(*shape, REPEATS)
    turns = []
    for _ in range(TURNS):
        ours = run_ours(*shared)
        sampled = run_ours(*shared, f"--row-keep-ratio={DEMO_KEEP_RATIO}")
        turns.append({"ours": ours, "ours, sampled rows": sampled} | {peer: run_peer(peer, *shared) for peer in PEERS})
    sides = {
        side: {
            "positions_per_second": shape[0] / statistics.median(turn[side]["seconds"] for turn in turns),
            "peak_mib": statistics.median(turn[side]["peak_mib"] for turn in turns),
        }
        for side in SIDES
    }

    def ratios(side: str) -> dict[str, dict[str, float]]:
        found = {}
        for peer in PEERS:
            each = [turn[peer]["seconds"] / turn[side]["seconds"] for turn in turns]
            found[peer] = {"ratio": statistics.median(each), "lowest": min(each), "highest": max(each)}
        return found

    return {
        "shapes": sides,
        "speed_ratio": ratios("ours"),
        "speed_ratio_sampled_rows": ratios("ours, sampled rows"),
        "memory_ratio": {peer: sides["ours"]["peak_mib"] / sides[peer]["peak_mib"] for peer in PEERS},
        "mfu": statistics.median(turn["ours"]["mfu"] for turn in turns),
    }


def scaling() -> dict[str, dict[int, dict[str, float]]]:
    """16k tokens a step: in longer and longer packs of documents of 1k tokens, and in longer and longer documents."""
    found: dict[str, dict[int, dict[str, float]]] = {"pack": {}, "document": {}}
    for kind, by_length in found.items():
        for length in LENGTHS:
            tokens, document = (length, 1024) if kind == "pack" else (STEP_TOKENS, length)
            shared = options(tokens, 3, 8192, "bfloat16", 1)
            step = run_ours(*shared, f"--document={document}", f"--packs={STEP_TOKENS // tokens}")
            by_length[length] = {
                "microseconds_per_token": 1e6 * step["seconds"] / STEP_TOKENS,
                "peak_mib": step["peak_mib"],
                "mfu": step["mfu"],
            }
    return found


def show(summary: dict[str, Any]) -> None:
    """The table that a person reads."""
    table = Table("shape", *SIDES, "speed / faster peer", "sampled", "memory / leaner peer", "MFU")
    for name, sides in summary["shapes"].items():
        cells = [f"{side['positions_per_second']:.0f}/s {side['peak_mib']:.0f} MiB" for side in sides.values()]
        speed, sampled = (
            min(peer["ratio"] for peer in summary[key][name].values())
            for key in ("speed_ratio", "speed_ratio_sampled_rows")
        )
        memory = max(summary["memory_ratio"][name].values())
        table.add_row(name, *cells, f"{speed:.2f}", f"{sampled:.2f}", f"{memory:.2f}", f"{summary['mfu'][name]:.2f}")
    Console(width=200).print(table)
    for kind, by_length in summary["scaling"].items():
        for length, step in by_length.items():
            print(f"{kind} of {length}: {', '.join(f'{key} {value:.3g}' for key, value in step.items())}")


def main() -> None:
    names = ("shapes", "speed_ratio", "speed_ratio_sampled_rows", "memory_ratio", "mfu")
    summary: dict[str, Any] = {name: {} for name in names}
    for shape in SHAPES:
        name = "T={} S={} Vd={} {}".format(*shape)
        for key, value in compare(shape).items():
            summary[key][name] = value
        print(name, json.dumps({key: summary[key][name] for key in names}), flush=True)
    summary["scaling"] = scaling()
    write_json(OUTPUT / "summary.json", summary | {"provenance": provenance()})
    write_json(OUTPUT / "bench.json", {"shapes": SHAPES, "supervised": SUPERVISED, "turns": TURNS, "repeats": REPEATS})
    show(summary)
    print(f"written to {OUTPUT / 'summary.json'}")


if __name__ == "__main__":
    main()
