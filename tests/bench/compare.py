"""`make compare`: every drafter family on one token budget of the sample corpus, by the same trainer and decoder.

Writes outputs/compare/summary.json after every family, and goes on from it. Its rows:

    drafter, trainable_parameters, train_seconds
    acceptance_length_t0, acceptance_length_t1    decoded at K = 3, float32, the 40 held-out prompts, T = 0 and 1
    draft_cost                                    time of a drafted token over that of a plain step, bf16, batch 1
    best_k, speedup                               of 1, 2, 3, 5: the K that is fastest over plain decoding
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from conf.records import provenance, read_json, write_json
from data.prepare import make_encoder
from tests.bench.decoder import read_ids, speedups
from tests.families import NAMES
from train.checkpoint import load_drafter

FOLDER = Path("outputs/compare")
BUDGET = ["epochs=0.6", "validation_conversations=0"]
"""About 100,000 trained positions."""
DRAFTS = (1, 2, 3, 5)
T1 = ["sampling=sampled", "plain_prompts=0"]


def call(module: str, *overrides: str) -> None:
    """One command of the project, as a user would give it."""
    subprocess.run([sys.executable, "-m", module, *overrides], check=True)


def measure(name: str) -> dict[str, Any]:
    """Train one family and measure it."""
    run = FOLDER / name
    call("train", "+target=smollm2", f"drafter={name}", f"output_dir={run}", "tracker=none", *BUDGET)
    lengths = {}
    for label, options in (("t0", ["plain_prompts=0"]), ("t1", T1)):
        output = FOLDER / f"{name}-{label}"
        call("eval", f"checkpoint={run}", f"output_dir={output}", *options)
        lengths[f"acceptance_length_{label}"] = read_json(output / "summary.json")["acceptance_length_decoded"]
    loaded = load_drafter(str(run), None, torch.bfloat16, trust_remote_code=False)
    prompts = read_ids(make_encoder(loaded.target, 8192), "sample:heldout40.jsonl")
    longest = loaded.drafter.max_draft_tokens
    found = speedups(
        loaded.target, loaded.drafter, prompts, [k for k in DRAFTS if longest is None or k <= longest]
    )  # fmt: skip
    best = max(found, key=lambda k: found[k]["speedup"])
    trained = read_json(run / "summary.json")
    return {
        "drafter": name,
        "trainable_parameters": trained["trainable_parameters"],
        "train_seconds": trained["train_seconds"],
        **lengths,
        "draft_cost": found[best]["draft_cost"],
        "best_k": int(best),
        "speedup": found[best]["speedup"],
    }


def show(rows: list[dict[str, Any]]) -> None:
    """One line per family."""
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=160).print(table)


def main() -> None:
    """All families, or those that are named."""
    output = FOLDER / "summary.json"
    rows: list[dict[str, Any]] = json.loads(output.read_text())["rows"] if output.exists() else []
    done = {row["drafter"] for row in rows}
    for name in sys.argv[1:] or NAMES:
        if name not in done:
            rows.append(measure(name))
            write_json(output, {"rows": rows, "budget": BUDGET, "provenance": provenance()})
    show(rows)


if __name__ == "__main__":
    main()
