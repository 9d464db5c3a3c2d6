"""What to do when a run of the same name is already there."""

from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from conf import InputError
from data.identity import TargetIdentity
from train.checkpoint import latest_checkpoint, read_manifest

MAY_CHANGE = frozenset(
    {"tracker", "log_every_steps", "keep_checkpoints", "validate_every_steps", "checkpoint_every_steps", "resume",
     "num_threads", "output_dir", "data.num_workers"}
)  # fmt: skip
"""Settings that do not change what is computed."""


def previous_run(
    folder: Path, composed: DictConfig, resume: Literal["auto", "never"], target: TargetIdentity, rank: int
) -> None:
    """Check that the run in `folder` can be continued, or move it aside.

    Raises:
        InputError: if it was started with other settings or for another target, naming both values.
    """
    if resume == "never":
        if rank == 0 and (folder / "metrics.jsonl").exists():
            folder.rename(_free_name(folder))
        return
    newest = latest_checkpoint(folder)
    if newest is None:
        return
    read_manifest(newest).target.require(target)
    before = _flat(OmegaConf.to_container(OmegaConf.load(newest / "config.yaml"), resolve=True))
    now = _flat(OmegaConf.to_container(composed, resolve=True))
    for key in sorted(before.keys() | now.keys()):
        if not {key, key.split(".")[0]} & MAY_CHANGE and before.get(key) != now.get(key):
            raise InputError(
                f"the run in {folder} was started with {key}={before.get(key)}, now it is {now.get(key)}: choose "
                "another run_name=, or resume=never to move the old run aside and start anew"
            )


def _free_name(folder: Path) -> Path:
    number = 1
    while (name := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    return name


def _flat(node: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(node, dict):
        return {prefix.removesuffix("."): node}
    flat: dict[str, Any] = {}
    for key, value in node.items():
        flat |= _flat(value, f"{prefix}{key}.")
    return flat
