"""`make compare`: every drafter family on the demo's corpus and token budget, by the same trainer and decoder.

The target's states are computed once and shared by all families; everything else is the trainer's own job. Writes
outputs/compare/summary.json after every family, and goes on from it. Its rows:

    drafter, trainable_parameters
    train_seconds                                 of the job, without the target's share (`target_seconds`, once)
    acceptance_length_t0, acceptance_length_t1    decoded at K = 3, float32, the 40 held-out prompts, T = 0 and 1
    draft_cost                                    time of a drafted token over that of a plain step, bf16, batch 1
    best_k, speedup                               of 1, 2, 3, 5: the K that is fastest over plain decoding

Families that are not trained (n-gram, suffix) are measured only. `python -m tests.bench.compare medusa mtp` takes some.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

from conf.cli import build, check_overrides
from conf.records import provenance, read_json, write_json
from data.batch import TargetFeatures, Wants
from data.features import FeatureStore
from data.loader import MicroBatch, TrainingStream
from data.prepare import make_encoder, prepare
from data.target import Target
from tests.bench.decoder import read_ids, speedups
from tests.families import FOLDER, NAMES
from train import job as train_job
from train.checkpoint import load_drafter
from train.drafters.base import Drafter, Proposer

OUTPUT = Path("outputs/compare")
COMMON = ["+target=smollm2", "tracker=none", "validation_conversations=0"]
HALF = "drafter.row_keep_ratio=0.5"
OPTIONS = {"medusa": [HALF], "medusa2": [HALF, f"drafter.init_from={OUTPUT}/medusa", "epochs=0.6"]}
"""What a family wants besides: five heads over the whole vocabulary would take more than half an hour on all rows, and
medusa2 goes on from medusa's run, through all of the target's layers, for a quarter of the budget."""
DRAFTS = (1, 2, 3, 5)
UNTRAINED = [name for name in sorted(path.stem for path in FOLDER.glob("*.yaml")) if name not in NAMES]


class Shared(FeatureStore):
    """A part of the states that another store holds."""

    def __init__(self, whole: FeatureStore, wants: Wants) -> None:
        self.whole, self.wants, self.target = whole, wants, whole.target

    def features(self, micro_batch: MicroBatch) -> TargetFeatures:
        """See FeatureStore.features."""
        found = self.whole.features(micro_batch)
        layers, width = self.whole.wants.aux_layers, self.target.hf_config.hidden_size
        states = found.aux_hidden_states.unflatten(-1, (len(layers), width))
        chosen = [layers.index(layer) for layer in self.wants.aux_layers]
        return TargetFeatures(states[..., chosen, :].flatten(-2), found.last_hidden_state)


def options_of(name: str) -> list[str]:
    return [*COMMON, f"drafter={name}", f"output_dir={OUTPUT}/{name}", *OPTIONS.get(name, [])]


def shared_states(names: list[str]) -> tuple[FeatureStore, float]:
    """The states that any of these families reads, and the seconds that they took."""
    jobs = [build(check_overrides("train", [*COMMON, f"drafter={name}"])) for name in names]
    first = jobs[0]
    target = Target(first.target)
    corpus = prepare(target, first.corpus, first.data.max_tokens, 0, first.seed)
    wants = [train_job.build_drafter(job, target, corpus).wants for job in jobs]
    layers = sorted({layer for want in wants for layer in want.aux_layers})
    stream = TrainingStream(corpus.train, first.data, first.seed, 2.0)  # 2 passes: it caches
    store = FeatureStore(target, Wants(aux_layers=tuple(layers), last_hidden_state=True), stream)
    started = time.monotonic()
    for step in range(stream.total_steps // 2):
        for micro_batch in stream.micro_batches(step, 0, 1):
            store.features(micro_batch)
    return store, time.monotonic() - started


@dataclass(frozen=True)
class Family:
    """A drafter that is ready to be measured."""

    facts: dict[str, Any]
    """Its row as far as training tells it."""
    source: list[str]
    """How `python -m eval` is told of it."""
    load: Callable[[], tuple[Target, Proposer]]
    """As engines would run it, in bf16."""


def trained(name: str, store: FeatureStore) -> Family:
    """By the trainer's own job, on states that are there already."""

    def shared(_target: Target, wants: Wants, _stream: TrainingStream) -> FeatureStore:
        return Shared(store, wants)

    with mock.patch.object(train_job, "FeatureStore", shared):
        train_job.run(check_overrides("train", options_of(name)))
    run = OUTPUT / name

    def load() -> tuple[Target, Proposer]:
        loaded = load_drafter(str(run), None, torch.bfloat16, trust_remote_code=False)
        return loaded.target, loaded.drafter

    summary = read_json(run / "summary.json")
    facts = {key: summary[key] for key in ("trainable_parameters", "train_seconds")}
    return Family(facts, [f"checkpoint={run}"], load)


def untrained(name: str) -> Family:
    """What drafts as it is."""
    source = ["+target=smollm2", f"+drafter={name}"]

    def load() -> tuple[Target, Proposer]:
        job = build(check_overrides("eval", source))
        target = Target(job.target, torch.bfloat16)
        return target, job.drafter.build(target.parts, torch.arange(target.hf_config.vocab_size))

    return Family({"trainable_parameters": 0, "train_seconds": 0.0}, source, load)


def measure(name: str, family: Family) -> dict[str, Any]:
    """Decode with a family."""
    lengths = {}
    for label, options in (("t0", []), ("t1", ["sampling=sampled"])):
        output = OUTPUT / f"{name}-{label}"
        command = [sys.executable, "-m", "eval", *family.source, f"output_dir={output}", "plain_prompts=0", *options]
        subprocess.run(command, check=True)
        lengths[f"acceptance_length_{label}"] = read_json(output / "summary.json")["acceptance_length_decoded"]
    target, proposer = family.load()
    longest = proposer.max_draft_tokens if isinstance(proposer, Drafter) else None
    drafts = [k for k in DRAFTS if longest is None or k <= longest]
    found = speedups(target, proposer, read_ids(make_encoder(target, 8192), "sample:heldout40.jsonl"), drafts)
    best = max(found, key=lambda k: found[k]["speedup"])
    return {
        **lengths, "draft_cost": found[best]["draft_cost"], "best_k": int(best), "speedup": found[best]["speedup"],
    }  # fmt: skip


def show(rows: list[dict[str, Any]]) -> None:
    """One line per family."""
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=160).print(table)


def main() -> None:
    """All families, or those that are named."""
    output = OUTPUT / "summary.json"
    found: dict[str, Any] = read_json(output) if output.exists() else {"rows": [], "target_seconds": None}
    done = {row["drafter"] for row in found["rows"]}
    missing = [name for name in sys.argv[1:] or [*UNTRAINED, *NAMES] if name not in done]
    heads = [name for name in missing if name in NAMES]
    store, found["target_seconds"] = shared_states(heads) if heads else (None, found["target_seconds"])
    for name in missing:
        family = trained(name, store) if store is not None and name in heads else untrained(name)
        found["rows"].append({"drafter": name, **family.facts, **measure(name, family)})
        write_json(output, {**found, "common": COMMON, "options": OPTIONS, "provenance": provenance()})
    show(found["rows"])


if __name__ == "__main__":
    main()
