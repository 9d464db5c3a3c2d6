"""`make bench-ablation`: what each choice of the demo's settings is worth, and how acceptance grows with training time.

Every row trains on half of the 609 conversations of corpus/sample.yaml unless it says otherwise, with two seeds (of
order, rows and initial weights), and is judged by the round-walk over the target's own answers to the 40 held-out
prompts (K = 3), which is what decoder and engine deliver. Target features are computed once and shared by all rows, so
`drafter_seconds` leaves the target out. Writes outputs/bench-ablation/summary.json after every run and goes on from it.
"""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from conf.cli import build, check_overrides
from conf.records import provenance, write_json
from data.corpus import CorpusConfig
from data.features import FeatureStore
from data.loader import TrainingStream
from data.prefetch import prepared_steps
from data.prepare import PreparedCorpus, make_encoder, prepare
from data.target import Target
from eval.suites import read_prompts
from train.drafters.base import Drafter
from train.engine import Engine, init_distributed
from train.job import TrainJob, build_drafter
from train.validation import Validation

OUTPUT = Path("outputs/bench-ablation/summary.json")
SEEDS = (0, 1)
COMMON = [
    "+target=smollm2",
    "drafter=eagle3",
    "corpus.max_conversations=null",
    "validation_conversations=0",
    "epochs=0.5",
]
ROWS: dict[str, list[str]] = {
    "as in the demo": [],
    "one whole pass": ["epochs=1"],
    "two packs a step": ["data.global_batch_packs=2"],
    "one training-time-test step": ["drafter.ttt_steps=1"],
    "all rows in all steps": ["drafter.row_keep_ratio=1.0"],
    "random layer": ["drafter.init_layer=null"],
    "AdamW, rate 1e-3": ["optim=adamw", "optim.lr=1e-3"],
    "Muon's momentum .95, rate .05": ["optim.momentum=0.95", "optim.muon_lr=0.05"],
    "loss lk_lambda": ["drafter.loss=lk_lambda"],
    "loss tv": ["drafter.loss=tv"],
    "wsd schedule": ["optim.schedule=wsd"],
}


def job_of(row: str, seed: int) -> TrainJob:
    """The settings of one run."""
    return build(check_overrides("train", [*COMMON, f"seed={seed}", f"drafter.init_seed={seed}", *ROWS[row]]))


def train(job: TrainJob, corpus: PreparedCorpus, target: Target, store: FeatureStore) -> tuple[Drafter, dict[str, Any]]:
    """One run of the trainer's own parts."""
    drafter = build_drafter(job, target, corpus)
    stream = TrainingStream(corpus.train, job.data, job.seed, job.epochs)
    accumulation = stream.accumulation_steps(1)
    engine = Engine(drafter, job.optim, job.deepspeed, job.precision, accumulation, stream.total_steps)
    seconds = 0.0
    for pairs in prepared_steps(stream, store, first_step=0, rank=0, world_size=1):
        started = time.monotonic()
        engine.step(pairs)
        seconds += time.monotonic() - started
    positions = stream.trained_tokens(stream.total_steps)
    return drafter, {"steps": stream.total_steps, "positions": positions, "drafter_seconds": round(seconds, 1)}


def show(runs: dict[str, dict[str, Any]]) -> None:
    """One line per row: means over the seeds, and the acceptance length of each."""
    table = Table("setting", "positions", "drafter s", "acceptance length", "each seed", "joint rates, first seed")
    for row in ROWS:
        done = [run for run in (runs.get(f"{row} / {seed}") for seed in SEEDS) if run]
        if done:
            lengths = [run["acceptance_length"] for run in done]
            table.add_row(
                row, str(done[0]["positions"]), f"{statistics.mean(run['drafter_seconds'] for run in done):.0f}",
                f"{statistics.mean(lengths):.3f}", " ".join(f"{length:.3f}" for length in lengths),
                " ".join(f"{rate:.3f}" for rate in done[0]["joint_rates"]),
            )  # fmt: skip
    Console(width=140).print(table)


def main() -> None:
    init_distributed()
    first = job_of("as in the demo", 0)
    target = Target(first.target)
    corpus = prepare(target, first.corpus, first.data.max_tokens, 0, 0)
    wants = build_drafter(first, target, corpus).wants
    store = FeatureStore(target, wants, TrainingStream(corpus.train, first.data, 0, 2.0))  # 2 passes: it caches
    heldout = CorpusConfig(name="heldout", path="sample:heldout40.jsonl", max_conversations=None)
    prompts = [prompt.input_ids for prompt in read_prompts(heldout, make_encoder(target, first.data.max_tokens))]
    judge = Validation(target, wants, prompts, 128)
    runs: dict[str, dict[str, Any]] = json.loads(OUTPUT.read_text())["runs"] if OUTPUT.exists() else {}
    chosen = [row for row in ROWS if not sys.argv[1:] or row in sys.argv[1:]]
    for seed in SEEDS:
        for row in chosen:
            if f"{row} / {seed}" in runs:
                continue
            drafter, facts = train(job_of(row, seed), corpus, target, store)
            with torch.no_grad():
                runs[f"{row} / {seed}"] = {**facts, **judge.measure(drafter, first.num_draft_tokens)}
            print(f"{row} / {seed}", runs[f"{row} / {seed}"], flush=True)
            write_json(OUTPUT, {"runs": runs, "overrides": ROWS, "provenance": provenance()})
    show(runs)


if __name__ == "__main__":
    main()
