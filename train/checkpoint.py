"""Checkpoints: safetensors, yaml and json in one folder that is there whole or not at all.

checkpoints/step-000100/  model.safetensors   the drafter's state
                          config.yaml         the job, resolved
                          manifest.json       step, target identity, figures
                          engine/             optimizer and schedule, for resuming
checkpoints/latest, best  links
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file, save_file
from torch import Tensor
from yaml import YAMLError

from conf import InputError
from conf.cli import rebuild
from conf.records import read_json, read_safetensors, write_json, write_text
from data.identity import TargetIdentity
from data.target import Target, TargetConfig
from train.drafters.base import Drafter, DrafterConfig

FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says about itself."""

    step: int
    trained_tokens: int
    target: TargetIdentity
    acceptance_length: float | None
    """Of the round-walk at this step; None where the run has no validation."""


@dataclass(frozen=True)
class LoadedDrafter:
    """A checkpoint, ready to draft for its target."""

    folder: Path
    drafter: Drafter
    drafter_config: DrafterConfig
    target: Target
    manifest: Manifest
    job: dict[str, Any]
    """The training job's resolved configuration."""


class CheckpointWriter:
    """Writes the checkpoints of one run. All ranks call `write`; rank 0 names the result."""

    def __init__(self, run_folder: Path, keep: int, is_main: bool, barrier: Callable[[], None]) -> None:
        self.folder = run_folder / "checkpoints"
        self.keep = keep
        self.is_main = is_main
        self.barrier = barrier

    def write(
        self, manifest: Manifest, config_yaml: str, weights: dict[str, Tensor], save_engine: Callable[[Path], None]
    ) -> Path:
        """Write everything under a temporary name, flush it to disk, then rename; then prune old checkpoints."""
        final = self.folder / f"step-{manifest.step:06d}"
        temporary = self.folder / f".writing-{final.name}"
        if self.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        self.barrier()
        save_engine(temporary)
        if self.is_main:
            save_file(weights, str(temporary / "model.safetensors"), metadata={"format": "pt"})
            write_text(temporary / "config.yaml", config_yaml)
            write_json(temporary / "manifest.json", {"format": FORMAT, **asdict(manifest)})
        self.barrier()
        if self.is_main:
            _flush(temporary)
            shutil.rmtree(final, ignore_errors=True)  # left by a run that was resumed from an earlier step
            temporary.rename(final)
            _link(self.folder / "latest", final.name)
            if self._is_best(manifest):
                _link(self.folder / "best", final.name)
            self._prune()
        self.barrier()
        return final

    def _is_best(self, manifest: Manifest) -> bool:
        best = self.folder / "best"
        if not best.exists():
            return True
        if manifest.acceptance_length is None:
            return True
        return manifest.acceptance_length >= (read_manifest(best.resolve()).acceptance_length or 0)

    def _prune(self) -> None:
        kept = {(self.folder / link).resolve() for link in ("latest", "best")}
        for folder in sorted(self.folder.glob("step-*"))[: -self.keep]:
            if folder.resolve() not in kept:
                shutil.rmtree(folder)


def latest_checkpoint(run_folder: Path) -> Path | None:
    """The newest complete checkpoint of a run, or None."""
    complete = sorted((run_folder / "checkpoints").glob("step-*/manifest.json"))
    return complete[-1].parent if complete else None


def find_checkpoint(path: str) -> Path:
    """A checkpoint folder, or the best checkpoint of a run folder.

    Raises:
        InputError: if `path` is neither.
    """
    folder = Path(path).expanduser()
    for candidate in (folder, folder / "checkpoints" / "best", folder / "checkpoints" / "latest", folder / "best"):
        if (candidate / "manifest.json").is_file():
            return candidate.resolve()
    raise InputError(f"{path} is no checkpoint: give checkpoint=outputs/train/RUN or one of its checkpoints/step-*")


def read_manifest(folder: Path) -> Manifest:
    """Read and check manifest.json.

    Raises:
        InputError: if it is missing, damaged or of another format.
    """
    fields = dict(read_json(folder / "manifest.json"))
    found = fields.pop("format", None)
    if found != FORMAT:
        raise InputError(f"{folder} has checkpoint format {found}, this version reads {FORMAT}")
    try:
        return Manifest(**{**fields, "target": TargetIdentity(**fields["target"])})
    except (KeyError, TypeError) as error:
        raise InputError(f"{folder / 'manifest.json'} lacks or has unknown fields ({error})") from error


def load_drafter(
    path: str, target_path: str | None, dtype: torch.dtype | None, trust_remote_code: bool
) -> LoadedDrafter:
    """Read a checkpoint and load the target that it was trained for.

    Args:
        path: run or checkpoint folder.
        target_path: where the target is now, if not where training found it.
        dtype: of target and drafter; None keeps the target's own for both.
        trust_remote_code: whether the target may bring code of its own. The checkpoint cannot decide that: it may
            come from anywhere.

    Raises:
        InputError: if anything is missing or damaged, or the target is another one.
    """
    folder = find_checkpoint(path)
    manifest = read_manifest(folder)
    try:
        job = OmegaConf.load(folder / "config.yaml")
    except (OSError, YAMLError) as error:
        raise InputError(f"cannot read {folder / 'config.yaml'}") from error
    if not isinstance(job, DictConfig) or not {"target", "drafter"} <= job.keys():
        raise InputError(f"{folder / 'config.yaml'} is no training config")
    if target_path is not None:
        job.target.path = target_path
    target_config: TargetConfig = rebuild(job.target, ("data.target.",))
    if target_config.trust_remote_code and not trust_remote_code:
        raise InputError(
            f"{folder} was trained on a target that runs code from {target_config.path}: "
            "add trust_remote_code=true if you trust it"
        )
    drafter_config: DrafterConfig = rebuild(job.drafter, ("train.drafters.",))
    weights = read_safetensors(folder / "model.safetensors", load_file)
    if "draft_to_target_ids" not in weights:
        raise InputError(f"{folder / 'model.safetensors'} lacks draft_to_target_ids")
    target = Target(target_config, dtype)
    manifest.target.require(target.identity())
    drafter = drafter_config.build(target.parts, weights["draft_to_target_ids"])
    if not isinstance(drafter, Drafter):
        raise InputError(f"{folder / 'config.yaml'} names drafter {drafter_config.name}, which has no weights")
    load_weights(drafter, weights, folder)
    target = put_to_work(drafter, target)
    container = OmegaConf.to_container(job, resolve=True)
    assert isinstance(container, dict)  # config.yaml is a mapping: OmegaConf.save wrote a DictConfig
    settings = {str(key): value for key, value in container.items()}
    return LoadedDrafter(folder, drafter, drafter_config, target, manifest, settings)


def put_to_work(drafter: Drafter, target: Target) -> Target:
    """Freeze a drafter, in its target's dtype and on its device; returns the target that it drafts for: this one, or
    what training has made of it."""
    drafter.requires_grad_(False).eval().to(target.device, target.model.dtype)
    changed = drafter.changed_target()
    return target if changed is None else target.with_model(changed)


def load_weights(drafter: Drafter, weights: dict[str, Tensor], source: Path) -> None:
    """Load a full state; nothing may be missing, unknown or of another shape.

    Raises:
        InputError: naming the tensors.
    """
    wanted = {name: tensor.shape for name, tensor in drafter.state_dict().items()}
    wrong = sorted(
        name for name in wanted.keys() | weights.keys()
        if name not in wanted or name not in weights or wanted[name] != weights[name].shape
    )  # fmt: skip
    if wrong:
        raise InputError(f"{source / 'model.safetensors'} does not fit its config: {', '.join(wrong[:5])}")
    drafter.load_state_dict(weights)


def _link(link: Path, name: str) -> None:
    temporary = link.with_name(f".{link.name}.writing")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(name)
    temporary.replace(link)


def _flush(folder: Path) -> None:
    """Force every file below `folder` to disk: a rename must not overtake its contents."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
