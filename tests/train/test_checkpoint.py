"""Checkpoints: which are kept, how they are found, and that only whole ones of ours are read."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from conf import InputError
from conf.cli import check_overrides
from tests.train.conftest import Launcher
from train.checkpoint import (
    CheckpointWriter,
    Manifest,
    find_checkpoint,
    latest_checkpoint,
    load_drafter,
    read_manifest,
)

Args = Callable[..., list[str]]


@pytest.fixture
def write(tiny_target: Any, tmp_path: Path) -> Callable[..., Path]:
    """write(step, acceptance_length, keep) -> folder of a checkpoint of tiny contents in tmp_path/run."""

    def make(step: int, acceptance_length: float | None = None, keep: int = 2) -> Path:
        writer = CheckpointWriter(tmp_path / "run", keep, is_main=True, barrier=lambda: None)
        manifest = Manifest(step, 10 * step, tiny_target("llama").identity(), acceptance_length)
        return writer.write(manifest, "a: 1\n", {"x": torch.tensor([step])}, lambda folder: None)

    return make


@pytest.fixture(scope="session")
def trained(launcher: Launcher, tiny_args: Args, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Run folders of real trainings, by ZeRO stage."""
    folder = tmp_path_factory.mktemp("trained")
    for zero in ("zero0", "zero2"):
        launcher("train", tiny_args(folder / zero, f"deepspeed={zero}", "epochs=1"), folder).succeeded()
    return {zero: folder / zero for zero in ("zero0", "zero2")}


@pytest.fixture(scope="session")
def saved(tiny_target: Any, tiny_drafter: Any, tiny_args: Args, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(checkpoint folder, the drafter in it), the weights noise of visible size."""
    target = tiny_target("qwen3")
    drafter = tiny_drafter(target, 200, seed=3)
    run = tmp_path_factory.mktemp("saved")
    composed = check_overrides("train", tiny_args(run))
    writer = CheckpointWriter(run, 1, is_main=True, barrier=lambda: None)
    manifest = Manifest(5, 50, target.identity(), 1.5)
    return writer.write(manifest, OmegaConf.to_yaml(composed), drafter.state_dict(), lambda folder: None), drafter


@pytest.fixture
def copied(saved: Any, tmp_path: Path) -> Path:
    """A checkpoint to damage."""
    return Path(shutil.copytree(saved[0], tmp_path / "copy"))


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def link(run: Path, name: str) -> str:
    return (run / "checkpoints" / name).resolve(strict=True).name


def test_newest_n_are_kept_besides_the_best(write: Callable[..., Path], tmp_path: Path) -> None:
    for step, length in ((1, 1.2), (2, 1.9), (3, 1.4), (4, 1.3), (5, 1.5)):
        write(step, length, keep=2)
    assert names(tmp_path / "run") == ["best", "latest", "step-000002", "step-000004", "step-000005"]
    assert link(tmp_path / "run", "best") == "step-000002"
    assert link(tmp_path / "run", "latest") == "step-000005"


@pytest.mark.parametrize(
    ("lengths", "best"),
    [
        ([1.1, 1.3, 1.2], 2),
        ([1.3, 1.2, 1.1], 1),
        ([1.2, 1.2, 1.1], 2),  # of equals the later
        ([None, None, None], 3),  # nothing was measured: the newest
        ([None, 1.0, 1.5], 3),
    ],
)
def test_best_follows_the_acceptance_length(
    write: Callable[..., Path], tmp_path: Path, lengths: Any, best: int
) -> None:
    for step, length in enumerate(lengths, start=1):
        write(step, length, keep=1)
    assert link(tmp_path / "run", "best") == f"step-{best:06d}"


def test_failed_write_leaves_no_checkpoint_and_the_links_alone(write: Callable[..., Path], tmp_path: Path) -> None:
    write(1)

    def broken(folder: Path) -> None:
        (folder / "engine").mkdir()
        raise OSError("disk full")

    writer = CheckpointWriter(tmp_path / "run", 2, is_main=True, barrier=lambda: None)
    with pytest.raises(OSError, match="disk full"):
        writer.write(read_manifest(tmp_path / "run/checkpoints/step-000001"), "", {}, broken)
    assert latest_checkpoint(tmp_path / "run") == tmp_path / "run/checkpoints/step-000001"
    assert link(tmp_path / "run", "latest") == link(tmp_path / "run", "best") == "step-000001"


def test_rank_without_main_writes_only_its_engine_part(tiny_target: Any, tmp_path: Path) -> None:
    barriers: list[str] = []
    writer = CheckpointWriter(tmp_path, 2, is_main=False, barrier=lambda: barriers.append("wait"))
    manifest = Manifest(1, 1, tiny_target("llama").identity(), None)
    writer.write(manifest, "", {}, lambda folder: barriers.append(folder.name))
    assert barriers == ["wait", ".writing-step-000001", "wait", "wait"]
    assert not list(tmp_path.iterdir())


def test_find_checkpoint_takes_run_and_checkpoint_folders(write: Callable[..., Path], tmp_path: Path) -> None:
    write(1, 1.8)
    write(2, 1.2)
    run = tmp_path / "run"
    for path, step in (
        (run, 1), (run / "checkpoints", 1), (run / "checkpoints/best", 1), (run / "checkpoints/latest", 2),
        (run / "checkpoints/step-000002", 2),
    ):  # fmt: skip
        assert find_checkpoint(str(path)) == (run / f"checkpoints/step-{step:06d}").resolve()


@pytest.mark.parametrize("path", ["nowhere", "empty", "a file"])
def test_find_checkpoint_refuses_anything_else(tmp_path: Path, path: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a file").write_text("x")
    with pytest.raises(InputError, match=f"{path} is no checkpoint: give checkpoint="):
        find_checkpoint(str(tmp_path / path))


@pytest.mark.parametrize("found", [2, None])
def test_manifest_of_another_format_is_refused(copied: Path, found: Any) -> None:
    fields = json.loads((copied / "manifest.json").read_text())
    (copied / "manifest.json").write_text(json.dumps({**fields, "format": found}))
    with pytest.raises(InputError, match=f"copy has checkpoint format {found}, this version reads 1"):
        read_manifest(copied)


def test_manifest_that_lacks_a_field_is_an_input_error(copied: Path) -> None:
    fields = json.loads((copied / "manifest.json").read_text())
    del fields["target"]
    (copied / "manifest.json").write_text(json.dumps(fields))
    with pytest.raises(InputError, match="manifest"):
        read_manifest(copied)


def test_loaded_drafter_is_the_saved_one(saved: Any) -> None:
    folder, drafter = saved
    loaded = load_drafter(str(folder), None, torch.float32, trust_remote_code=False)
    state = loaded.drafter.state_dict()
    assert state.keys() == drafter.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in drafter.state_dict().items())
    assert not any(parameter.requires_grad for parameter in loaded.drafter.parameters())
    assert (loaded.manifest.step, loaded.manifest.acceptance_length) == (5, 1.5)
    assert loaded.job["data"]["pack_tokens"] == 256


def test_dtype_of_loading_is_that_of_target_and_drafter(saved: Any) -> None:
    loaded = load_drafter(str(saved[0]), None, torch.bfloat16, trust_remote_code=False)
    parameters = (*loaded.drafter.parameters(), *loaded.target.model.parameters())
    assert {parameter.dtype for parameter in parameters} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("missing", "fc.weight"), ("missing", "midlayer.self_attn.q_proj.weight"), ("missing", "draft_to_target_ids"),
        ("misshapen", "fc.weight"), ("misshapen", "norm.weight"), ("misshapen", "lm_head.weight"),
    ],
)  # fmt: skip
def test_missing_or_misshapen_tensor_is_named(copied: Path, name: str, fault: str) -> None:
    path = copied / "model.safetensors"
    weights = load_file(path)
    tensor = weights.pop(name)
    if fault == "misshapen":
        weights[name] = torch.cat([tensor, tensor])
    save_file(weights, path)
    with pytest.raises(InputError, match=name):
        load_drafter(str(copied), None, torch.float32, trust_remote_code=False)


def test_extra_tensor_is_named(copied: Path) -> None:
    path = copied / "model.safetensors"
    save_file({**load_file(path), "midlayer.extra.weight": torch.zeros(1)}, path)
    with pytest.raises(InputError, match=r"model\.safetensors does not fit its config: midlayer\.extra\.weight"):
        load_drafter(str(copied), None, torch.float32, trust_remote_code=False)


@pytest.mark.parametrize("content", [None, "a: [1\n", "- 1\n", "target: {}\n"])
def test_missing_or_damaged_config_is_an_input_error(copied: Path, content: str | None) -> None:
    (copied / "config.yaml").unlink()
    if content is not None:
        (copied / "config.yaml").write_text(content)
    with pytest.raises(InputError, match="config"):
        load_drafter(str(copied), None, torch.float32, trust_remote_code=False)


@pytest.mark.parametrize(
    ("key", "target"),
    [
        ("drafter", "os.system"),
        ("target", "shutil.copyfile"),
        (
            "drafter",
            "train.drafters.eagle3.torch.serialization.shutil.copyfile",
        ),  # our prefix, somebody else's function
        ("target", "data.target.wheel_target.shutil.copyfile"),
        ("drafter.loss", "shutil.copyfile"),  # Hydra instantiates nested nodes first
        ("target.chat_template_kwargs.x", "shutil.copyfile"),
    ],
)
def test_config_that_names_a_foreign_function_is_refused_and_nothing_is_called(
    copied: Path, tmp_path: Path, key: str, target: str
) -> None:
    (tmp_path / "secret").write_text("x")
    job = OmegaConf.load(copied / "config.yaml")
    call = {"_target_": target, "_args_": [str(tmp_path / "secret"), str(tmp_path / "called")]}
    OmegaConf.update(job, key, call, merge=False, force_add=True)
    OmegaConf.save(job, copied / "config.yaml")
    with pytest.raises(InputError):
        load_drafter(str(copied), None, torch.float32, trust_remote_code=False)
    assert not (tmp_path / "called").exists()


def test_checkpoint_cannot_allow_remote_code_by_itself(copied: Path) -> None:
    job = OmegaConf.load(copied / "config.yaml")
    job.target.trust_remote_code = True
    OmegaConf.save(job, copied / "config.yaml")
    with pytest.raises(InputError, match="add trust_remote_code=true if you trust it"):
        load_drafter(str(copied), None, torch.float32, trust_remote_code=False)
    assert load_drafter(str(copied), None, torch.float32, trust_remote_code=True).manifest.step > 0


@pytest.mark.parametrize("zero", ["zero0", "zero2"])
def test_no_file_of_a_checkpoint_is_a_pickle_or_a_program(trained: dict[str, Path], zero: str) -> None:
    folder = trained[zero] / "checkpoints" / "step-000004"
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    states = {"engine/mp_rank_00_model_states.pt"}  # DeepSpeed's names; the contents are ours
    if zero == "zero2":
        states.add("engine/zero_pp_rank_0_mp_rank_00_optim_states.pt")
    assert files == {"model.safetensors", "config.yaml", "manifest.json", *states}
    for name in {"model.safetensors", *states}:
        content = (folder / name).read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
        assert 8 + length + max(ends) == len(content)  # a safetensors file, whole, with nothing behind it
