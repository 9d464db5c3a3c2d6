"""Drafters that start from an existing head (`drafter.init_from=`): ours, or one that other code has written.

Names are translated by the family (`Drafter.translate`). Where a file could mean two things it is refused: a head that
is read wrongly trains on, only worse.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import Tensor

from conf import InputError
from conf.records import read_json, read_safetensors
from data.decoder import TargetParts
from train.checkpoint import find_checkpoint, load_weights
from train.drafters.base import Drafter, DrafterConfig, Proposer

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class Head:
    """A head as it lies on disk."""

    folder: Path
    tensors: dict[str, Tensor]
    config: dict[str, Any]
    """config.json of a foreign head; {} where it has none."""
    family: str | None
    """Of one of our checkpoints; None for a foreign head."""

    def draft_to_target_ids(self, vocab_size: int) -> Tensor:
        """(Vd,) ascending absolute ids.

        Raises:
            InputError: if the file's `d2t` can be read in two ways, or in none.
        """
        if self.family is not None:
            return self.tensors["draft_to_target_ids"]
        if "d2t" not in self.tensors:
            return torch.arange(vocab_size)
        stored = self.tensors["d2t"].to(torch.int64)
        readings = {"offsets": stored + torch.arange(len(stored)), "absolute ids": stored}
        valid = {
            name: ids for name, ids in readings.items()
            if bool((ids.diff() > 0).all()) and int(ids.min()) >= 0 and int(ids.max()) < vocab_size
        }  # fmt: skip
        if "t2d" in self.tensors:
            known = torch.nonzero(self.tensors["t2d"]).flatten()
            valid = {name: ids for name, ids in valid.items() if torch.equal(ids, known)}
        if len(valid) != 1:
            found = " or as ".join(valid) or "neither offsets nor absolute ids of this target"
            raise InputError(f"drafter.init_from={self.folder}: its d2t can be read as {found}; repair the file first")
        return next(iter(valid.values()))

    def put_into(self, drafter: Drafter, name: str) -> None:
        """Load the tensors into an untrained drafter of this name and the same draft vocabulary.

        Raises:
            InputError: if the head is of another family, shape or convention.
        """
        tensors = self.tensors
        if self.family not in (None, name):
            tensors = {**drafter.state_dict(), **tensors}  # what this family adds to that one starts as it is
        if self.family is None:
            translated = drafter.translate(self.tensors, self.config)
            tensors = {**translated, "draft_to_target_ids": drafter.draft_to_target_ids}
        load_weights(drafter, tensors, self.folder)


def build_from_head(settings: DrafterConfig, target: TargetParts, vocabulary: Callable[[], Tensor]) -> Proposer:
    """Make the drafter, from the head that its settings name if they name one.

    Args:
        settings: of the drafter.
        target: what it runs ahead of.
        vocabulary: (Vd,) ascending ids to draft from where there is no head to say so.

    Raises:
        InputError: if the head cannot be read, or the settings do not fit it or the target.
    """
    folder = settings.warm_start()
    head = None if folder is None else read_head(folder, settings.families())
    ids = vocabulary() if head is None else head.draft_to_target_ids(target.config.vocab_size)
    try:
        drafter = settings.build(target, ids)
    except ValueError as error:  # the drafter's settings do not fit this target
        raise InputError(str(error)) from error
    if head is not None:
        assert isinstance(drafter, Drafter)  # only drafters with weights have an init_from
        head.put_into(drafter, settings.name)
    return drafter


def read_head(path: str, families: Sequence[str]) -> Head:
    """Read a run or checkpoint of ours, or a folder that SpecForge, speculators, EAGLE or Medusa has written.

    Args:
        path: the folder.
        families: names of the drafters whose checkpoints will do.

    Raises:
        InputError: if there is nothing to read, or the checkpoint is of another family.
    """
    folder = Path(path).expanduser()
    files = sorted(folder.glob("*.safetensors"))
    if not files or (folder / "manifest.json").is_file():
        pickle = find_pickle(folder)
        if pickle is not None:
            raise InputError(
                f"drafter.init_from={path}: {pickle} is a pickle, which may run code; save it as safetensors"
            )
        own = find_checkpoint(path)
        name = OmegaConf.load(own / "config.yaml").drafter.name
        if name not in families:
            raise InputError(
                f"drafter.init_from={path} is a checkpoint of drafter {name}, not of {' or '.join(families)}"
            )
        return Head(own, read_safetensors(own / "model.safetensors", load_file), {}, name)
    return Head(folder, *read_files(folder, files), None)


def find_pickle(folder: Path) -> str | None:
    """The name of a pickle in `folder`, which is never read."""
    return next((file.name for pattern in PICKLES for file in folder.glob(pattern)), None)


def read_files(folder: Path, files: Sequence[Path]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a foreign head's files, and its config.json; {} where it has none."""
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= read_safetensors(file, load_file)
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    return tensors, config
