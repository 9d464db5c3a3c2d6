"""SIGKILL at any moment: nothing half-written is ever visible, and the resumed run is the uninterrupted one."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.train.conftest import Launcher, environment, losses, rows
from train.checkpoint import find_checkpoint, latest_checkpoint, read_manifest

STEPS, EVERY = 8, 3
COMMON = ("data.global_batch_packs=2", "epochs=4", f"checkpoint_every_steps={EVERY}", "keep_checkpoints=9")
Args = Callable[..., list[str]]
SETTINGS = [
    ("adamw", "zero0", 1), ("adamw_8bit", "zero0", 1), ("muon", "zero0", 1), ("adamw", "zero2", 1), ("muon", "zero2", 2)
]  # fmt: skip
MOMENTS = {
    "inside DeepSpeed's files": ("train.engine.save_state", 2),
    "before the drafter's weights": ("train.checkpoint.save_file", 2),
    "before the manifest": ("train.checkpoint.write_json", 2),
    "before the flush": ("train.checkpoint._flush", 2),
    "before the rename": ("pathlib.Path.rename", 2),
}
"""Moments of the second checkpoint (step 6); the first one (step 3) is whole by then."""


@pytest.fixture(scope="session")
def uninterrupted(launcher: Launcher, tiny_args: Args, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """uninterrupted(optim, zero, ranks) -> folder of the run that nothing disturbed."""
    made: dict[tuple[str, str, int], Path] = {}

    def make(optim: str, zero: str, ranks: int) -> Path:
        key = (optim, zero, ranks)
        if key not in made:
            folder = tmp_path_factory.mktemp("whole")
            argv = tiny_args(folder / "out", *COMMON, f"optim={optim}", f"deepspeed={zero}")
            launcher("train", argv, folder, ranks).succeeded()
            assert len(losses(folder / "out")) == STEPS
            made[key] = folder / "out"
        return made[key]

    return make


def assert_whole(run: Path, step: int) -> None:
    """The newest visible checkpoint is that of `step` and can be read; so is what `latest` names."""
    visible = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
    assert visible == [f"step-{done:06d}" for done in range(EVERY, step + 1, EVERY)]
    newest = latest_checkpoint(run)
    assert newest is not None
    for folder in (newest, (run / "checkpoints" / "latest").resolve(strict=True), find_checkpoint(str(run))):
        assert read_manifest(folder).step == int(folder.name.removeprefix("step-"))
        assert load_file(folder / "model.safetensors")
        assert (folder / "config.yaml").stat().st_size > 0
    assert newest.name == f"step-{step:06d}"


def assert_equal_runs(run: Path, reference: Path) -> None:
    assert [row["step"] for row in rows(run)] == list(range(1, STEPS + 1))
    keys = ("loss", "loss/step", "match/step", "gradient_norm", "learning_rate", "acceptance_length", "joint_rates")
    for ours, theirs in zip(rows(run), rows(reference), strict=True):
        assert {key: ours.get(key) for key in keys} == {key: theirs.get(key) for key in keys}
    ours, theirs = (load_file(folder / "checkpoints" / "latest" / "model.safetensors") for folder in (run, reference))
    assert all(bool((ours[name] == tensor).all()) for name, tensor in theirs.items())


@pytest.mark.parametrize(("optim", "zero", "ranks"), SETTINGS)
def test_killed_at_a_random_step_and_resumed_equals_uninterrupted(
    launcher: Launcher, tiny_args: Args, tmp_path: Path, uninterrupted: Callable[..., Path],
    optim: str, zero: str, ranks: int,
) -> None:  # fmt: skip
    if optim == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    step = random.Random(f"{optim}{zero}").randint(EVERY + 1, STEPS)
    argv = tiny_args(tmp_path / "out", *COMMON, f"optim={optim}", f"deepspeed={zero}")
    killed = launcher("train", argv, tmp_path, ranks, kill=("train.engine.Engine.step", step))
    assert killed.codes == [-signal.SIGKILL] * ranks
    assert_whole(tmp_path / "out", (step - 1) // EVERY * EVERY)
    launcher("train", argv, tmp_path, ranks).succeeded()
    assert_equal_runs(tmp_path / "out", uninterrupted(optim, zero, ranks))


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_while_writing_a_checkpoint_leaves_the_one_before(
    launcher: Launcher, tiny_args: Args, tmp_path: Path, uninterrupted: Callable[..., Path], moment: str
) -> None:
    argv = tiny_args(tmp_path / "out", *COMMON, "optim=muon")
    killed = launcher("train", argv, tmp_path, kill=MOMENTS[moment])
    assert killed.codes == [-signal.SIGKILL]
    assert_whole(tmp_path / "out", EVERY)
    launcher("train", argv, tmp_path).succeeded()
    assert_equal_runs(tmp_path / "out", uninterrupted("muon", "zero0", 1))
    assert not list((tmp_path / "out" / "checkpoints").glob(".writing-*"))


def test_killed_while_writing_a_zero2_checkpoint_of_two_ranks(
    launcher: Launcher, tiny_args: Args, tmp_path: Path, uninterrupted: Callable[..., Path]
) -> None:
    argv = tiny_args(tmp_path / "out", *COMMON, "optim=muon", "deepspeed=zero2")
    killed = launcher("train", argv, tmp_path, 2, kill=("train.engine.save_state", 3))
    assert killed.code == -signal.SIGKILL
    assert_whole(tmp_path / "out", EVERY)
    launcher("train", argv, tmp_path, 2).succeeded()
    assert_equal_runs(tmp_path / "out", uninterrupted("muon", "zero2", 2))


def test_killed_between_naming_a_checkpoint_and_linking_it_loses_no_row(
    launcher: Launcher, tiny_args: Args, tmp_path: Path, uninterrupted: Callable[..., Path]
) -> None:
    argv = tiny_args(tmp_path / "out", *COMMON, "optim=muon")
    # Calls 1 and 2 link `latest` and `best` of step 3, call 3 `latest` of step 6.
    assert launcher("train", argv, tmp_path, kill=("train.checkpoint._link", 3)).codes == [-signal.SIGKILL]
    assert_whole(tmp_path / "out", 2 * EVERY)
    launcher("train", argv, tmp_path).succeeded()
    assert_equal_runs(tmp_path / "out", uninterrupted("muon", "zero0", 1))


def test_real_command_killed_from_outside_and_resumed(launcher: Launcher, tiny_args: Args, tmp_path: Path) -> None:
    slow = ("epochs=16", "checkpoint_every_steps=4", "validate_every_steps=1000", "keep_checkpoints=1")
    argv = tiny_args(tmp_path / "out", *slow, "optim=muon")
    process = subprocess.Popen(
        [sys.executable, "-m", "train", *argv], cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    metrics = tmp_path / "out" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.exists() or metrics.read_text().count("\n") < 6:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    interrupted = len(metrics.read_text().splitlines())
    newest = latest_checkpoint(tmp_path / "out")
    assert newest is not None
    step = read_manifest(newest).step
    launcher("train", argv, tmp_path).succeeded()
    launcher("train", tiny_args(tmp_path / "whole", *slow, "optim=muon"), tmp_path).succeeded()
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "out")) > interrupted  # it really was interrupted
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["resumed_from_step"] == step >= 4


@pytest.mark.parametrize("kept", [0.97, "brace"])
def test_metrics_line_cut_by_a_power_failure_does_not_stop_the_resumed_run(
    launcher: Launcher, tiny_args: Args, tmp_path: Path, uninterrupted: Callable[..., Path], kept: float | str
) -> None:
    argv = tiny_args(tmp_path / "out", *COMMON, "optim=muon")
    assert launcher("train", argv, tmp_path, kill=("train.engine.Engine.step", 6)).codes == [-signal.SIGKILL]
    metrics = tmp_path / "out" / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    # "brace": the cut falls behind the inner object's closing brace.
    size = lines[-1].index("}") + 1 if isinstance(kept, str) else int(kept * len(lines[-1]))
    metrics.write_text("\n".join([*lines[:-1], lines[-1][:size]]))
    launcher("train", argv, tmp_path).succeeded()
    assert_equal_runs(tmp_path / "out", uninterrupted("muon", "zero0", 1))
