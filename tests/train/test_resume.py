"""What a second run of the same name does: continue, refuse, or move the first one aside."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from conf import InputError
from conf.cli import check_overrides
from tests.train.conftest import Finished, Launcher
from train.checkpoint import CheckpointWriter, Manifest
from train.resume import MAY_CHANGE, previous_run

Args = Callable[..., list[str]]


@pytest.fixture
def identity(tiny_target: Any) -> Any:
    return tiny_target("qwen3").identity()


@pytest.fixture
def begun(tiny_args: Args, identity: Any, tmp_path: Path) -> Path:
    """A run folder with one checkpoint, of the settings `tiny_args` gives."""
    run = tmp_path / "run"
    writer = CheckpointWriter(run, 1, is_main=True, barrier=lambda: None)
    config_yaml = OmegaConf.to_yaml(check_overrides("train", tiny_args(run)), resolve=True)
    writer.write(Manifest(3, 30, identity, None), config_yaml, {"x": torch.zeros(1)}, lambda folder: None)
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_same_settings_continue_and_change_nothing(begun: Path, tiny_args: Args, identity: Any) -> None:
    before = contents(begun)
    previous_run(begun, check_overrides("train", tiny_args(begun)), "auto", identity, 0)
    assert contents(begun) == before


@pytest.mark.parametrize(
    ("override", "key", "then", "now"),
    [
        ("seed=7", "seed", "0", "7"),
        ("epochs=3", "epochs", "2", "3"),
        ("optim.lr=0.5", "optim.lr", "0.001", "0.5"),
        ("optim=adamw", "optim.adapter_lr", "0.0005", "0.0002"),  # the first key in order of the alphabet that differs
        ("deepspeed=zero2", "deepspeed.zero_optimization.stage", "0", "2"),
        ("data.global_batch_packs=4", "data.global_batch_packs", "1", "4"),
        ("drafter.ttt_steps=2", "drafter.ttt_steps", "3", "2"),
        ("corpus.path=other.jsonl", "corpus.path", r".*talk\.jsonl", "other.jsonl"),
        ("precision=bfloat16", "precision", "float32", "bfloat16"),
        ("+target.chat_template_kwargs.think=1", "target.chat_template_kwargs.think", "None", "1"),
    ],
)
def test_changed_setting_is_refused_with_key_and_both_values(
    begun: Path, tiny_args: Args, identity: Any, override: str, key: str, then: str, now: str
) -> None:
    composed = check_overrides("train", tiny_args(begun, override))
    with pytest.raises(InputError, match=rf"was started with {key}={then}, now it is {now}: choose .*resume=never"):
        previous_run(begun, composed, "auto", identity, 0)
    assert (begun / "checkpoints" / "latest").exists()


FREE = {
    "tracker": "tracker=wandb", "log_every_steps": "log_every_steps=9", "keep_checkpoints": "keep_checkpoints=9",
    "validate_every_steps": "validate_every_steps=9", "checkpoint_every_steps": "checkpoint_every_steps=9",
    "resume": "+resume=auto", "num_threads": "num_threads=3", "output_dir": "output_dir=elsewhere",
    "data.num_workers": "data.num_workers=2",
}  # fmt: skip


def test_every_free_setting_is_tried_below() -> None:
    assert set(FREE) == MAY_CHANGE


@pytest.mark.parametrize("key", sorted(set(FREE) - {"resume"}))
def test_settings_that_change_no_result_are_free(begun: Path, tiny_args: Args, identity: Any, key: str) -> None:
    composed = check_overrides("train", tiny_args(begun, FREE[key]))
    assert key in MAY_CHANGE
    previous_run(begun, composed, "auto", identity, 0)


def test_settings_of_a_run_that_was_started_with_resume_never_do_not_bind(
    begun: Path, tiny_args: Args, identity: Any
) -> None:
    saved = begun / "checkpoints" / "latest" / "config.yaml"
    saved.write_text(saved.read_text().replace("resume: auto", "resume: never"))
    previous_run(begun, check_overrides("train", tiny_args(begun)), "auto", identity, 0)


def test_resume_never_moves_the_old_run_aside_whole(begun: Path, tiny_args: Args, identity: Any) -> None:
    composed = check_overrides("train", tiny_args(begun, "resume=never", "seed=9"))
    before = contents(begun)
    previous_run(begun, composed, "never", identity, 0)
    assert not begun.exists()
    assert contents(begun.with_name("run.old-1")) == before
    assert (begun.with_name("run.old-1") / "checkpoints" / "latest" / "manifest.json").is_file()


def test_older_runs_aside_keep_their_names(begun: Path, tiny_args: Args, identity: Any) -> None:
    begun.with_name("run.old-1").mkdir()
    (begun.with_name("run.old-1") / "mine").touch()
    previous_run(begun, check_overrides("train", tiny_args(begun)), "never", identity, 0)
    assert contents(begun.with_name("run.old-1")) == {"mine": b""}
    assert "metrics.jsonl" in contents(begun.with_name("run.old-2"))


def test_only_rank_0_moves_anything(begun: Path, tiny_args: Args, identity: Any) -> None:
    previous_run(begun, check_overrides("train", tiny_args(begun)), "never", identity, 1)
    assert begun.exists()


def test_resume_never_keeps_the_metrics_of_a_run_without_a_checkpoint(
    launcher: Launcher, tiny_args: Args, tmp_path: Path
) -> None:
    run = tmp_path / "out"
    launcher("train", tiny_args(run, "optim=adamw"), tmp_path, kill=("train.engine.Engine.step", 4))
    lines = (run / "metrics.jsonl").read_text()
    assert lines.count("\n") == 3
    launcher("train", tiny_args(run, "optim=adamw", "resume=never", "seed=1"), tmp_path).succeeded()
    kept = [path.read_text() for path in tmp_path.rglob("metrics.jsonl")]
    assert lines in kept


def test_other_target_is_refused_with_both_values(
    begun: Path, tiny_args: Args, identity: Any, tiny_target: Any
) -> None:
    other = tiny_target("qwen3", seed=1).identity()
    with pytest.raises(InputError) as error:
        previous_run(begun, check_overrides("train", tiny_args(begun)), "auto", replace(other, name="other"), 0)
    for part in ("tiny-qwen3", "other", identity.weights_sha256, other.weights_sha256):
        assert part in str(error.value)


@pytest.fixture(scope="module")
def finished(launcher: Launcher, tiny_args: Args, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """finished(zero, folder) -> (run again on so many ranks, run folder): a copy of a finished run of one rank."""
    made: dict[str, Path] = {}

    def make(zero: str, folder: Path) -> tuple[Callable[[int], Finished], Path]:
        settings = ("optim=adamw", f"deepspeed={zero}", "epochs=1", "data.global_batch_packs=2", "output_dir=out")
        argv = [argument for argument in tiny_args(Path("out"), *settings) if not argument.startswith("output_dir=/")]
        if zero not in made:
            made[zero] = tmp_path_factory.mktemp(zero)
            launcher("train", argv, made[zero]).succeeded()
        shutil.copytree(made[zero] / "out", folder / "out", symlinks=True)
        return lambda ranks: launcher("train", argv, folder, ranks), folder / "out"

    return make


def assert_one_sentence(done: Finished, *parts: str) -> None:
    assert done.code == 2, done.err[-2000:]
    (line,) = [line for line in done.err.splitlines() if line.startswith("error:")]
    assert "Traceback" not in done.err
    assert all(part in line for part in parts), line


def test_finished_run_repeats_nothing(finished: Any, tmp_path: Path) -> None:
    again, run = finished("zero0", tmp_path)
    metrics, checkpoints = (run / "metrics.jsonl").read_text(), contents(run / "checkpoints")
    again(1).succeeded()
    assert (run / "metrics.jsonl").read_text() == metrics
    assert contents(run / "checkpoints") == checkpoints


@pytest.mark.parametrize(
    ("zero", "name"),
    [
        ("zero0", "mp_rank_00_model_states.pt"),
        ("zero2", "mp_rank_00_model_states.pt"),
        ("zero2", "zero_pp_rank_0_mp_rank_00_optim_states.pt"),
    ],
)
@pytest.mark.parametrize("fault", ["missing", "truncated"])
def test_missing_or_truncated_engine_file_is_one_sentence(
    finished: Any, tmp_path: Path, zero: str, name: str, fault: str
) -> None:
    again, run = finished(zero, tmp_path)
    path = run / "checkpoints" / "latest" / "engine" / name
    content = path.read_bytes()
    path.unlink()
    if fault == "truncated":
        path.write_bytes(content[:-8])
    assert_one_sentence(again(1), "engine")


def test_partitioned_state_on_another_number_of_ranks_is_one_sentence(finished: Any, tmp_path: Path) -> None:
    again, run = finished("zero2", tmp_path)
    before = contents(run / "checkpoints")
    assert_one_sentence(again(2), "1", "2")
    assert contents(run / "checkpoints") == before
