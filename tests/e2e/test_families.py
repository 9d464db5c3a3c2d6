"""Every family through the real commands: train, kill, resume, evaluate."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.families import NAMES
from tests.train.conftest import TINY, Launcher, rows, write_corpus

STEPS = 6
COMMON = ("data.global_batch_packs=2", "epochs=3", "checkpoint_every_steps=2", "num_draft_tokens=2")
OF_EAGLE3 = ("drafter=", "drafter.train_lm_head", "drafter.step_loss_decay", "drafter.row_keep_ratio")


@pytest.mark.parametrize("name", NAMES)
def test_killed_and_resumed_run_equals_the_uninterrupted_one_and_is_evaluated(
    launcher: Launcher, tiny_folder: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    write_corpus(tmp_path / "talk.jsonl", 14)
    common = [argument for argument in TINY if not argument.startswith(OF_EAGLE3)]
    argv = [*common, *COMMON, f"target.path={tiny_folder('qwen3')}", "corpus.path=talk.jsonl", f"drafter={name}"]
    launcher("train", [*argv, "output_dir=whole"], tmp_path).succeeded()
    killed = launcher("train", [*argv, "output_dir=cut"], tmp_path, kill=("train.engine.Engine.step", STEPS - 2))
    assert killed.codes == [-signal.SIGKILL]
    launcher("train", [*argv, "output_dir=cut"], tmp_path).succeeded()
    whole, cut = (rows(tmp_path / run) for run in ("whole", "cut"))
    assert [row["step"] for row in cut] == list(range(1, len(whole) + 1))
    assert [row["loss"] for row in cut] == [row["loss"] for row in whole]
    ours, theirs = (load_file(tmp_path / run / "checkpoints/latest/model.safetensors") for run in ("cut", "whole"))
    assert all(bool((ours[key] == tensor).all()) for key, tensor in theirs.items())
    options = ["corpus=jsonl", "corpus.path=talk.jsonl", "max_tokens=12", "draft.num_draft_tokens=2", "plain_prompts=2"]
    launcher("eval", ["checkpoint=cut", "output_dir=eval", "num_draft_tokens=2", *options], tmp_path).succeeded()
    summary = json.loads((tmp_path / "eval" / "summary.json").read_text())
    assert summary["outputs_equal_to_plain"] == 2 and summary["rounds_differing_from_walk"] == []
    assert summary["acceptance_length_walk"] == pytest.approx(summary["acceptance_length_decoded"])
