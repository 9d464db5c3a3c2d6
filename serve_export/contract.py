"""What an exported folder must hold, checked against its files alone: exact tensors, shapes, dtypes, config relations.

Engines do not check this: vLLM serves a head without `fc.weight` or `d2t` at zero acceptance, SGLang skips unknown
names. So every export is held against the table of its format (tables.py) before it gets its name, and again whenever
`python -m serve_export check=FOLDER` is asked.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from conf import InputError
from conf.records import read_json, read_safetensors
from serve_export.source import Known

Shape = tuple[int, ...]
ABSENT = object()
"""A key that must not be there."""


@dataclass(frozen=True)
class Table:
    """What a folder of one format must hold; every entry follows from `Known` alone."""

    engines: str
    """What reads it, and the version that this was read from or run with."""
    keys: Callable[[Known], Mapping[str, Any]]
    """Dotted key of config.json -> the value that it must have, or ABSENT."""
    tensors: Callable[[Known], Mapping[str, Shape]]
    """Name -> shape of every float tensor, which all have the dtype of the export."""
    weights: str = "model.safetensors"
    has_map: bool = False
    """Whether the draft vocabulary is mapped by `d2t` (offsets) and `t2d`."""

    def faults(self, folder: Path, known: Known) -> list[str]:
        """Everything that is wrong, one sentence each.

        Raises:
            InputError: if a file is missing or damaged.
        """
        config = read_json(folder / "config.json")
        tensors: dict[str, Tensor] = read_safetensors(folder / self.weights, load_file)
        maps = _maps(known) if self.has_map and known.has_map else {}
        wanted = {name: (shape, getattr(torch, known.dtype)) for name, shape in self.tensors(known).items()} | maps
        return [
            *key_faults(config, self.keys(known)),
            *tensor_faults(tensors, wanted),
            *(map_faults(tensors, known) if maps else []),
        ]


def require(faults: list[str], folder: Path) -> None:
    """Refuse a folder with faults.

    Raises:
        InputError: naming them.
    """
    if faults:
        raise InputError(f"{folder} breaks the serving contract: {'; '.join(faults)}")


def key_faults(config: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Keys that are missing or have another value."""
    faults = []
    for key, value in wanted.items():
        found: Any = config
        for part in key.split("."):
            found = found.get(part, ABSENT) if isinstance(found, Mapping) else ABSENT
        faults += value_faults(key, found, value)
    return faults


def value_faults(key: str, found: Any, wanted: Any) -> list[str]:
    """What is wrong with one key; ABSENT stands for no value."""
    if found is ABSENT and wanted is not ABSENT:
        return [f"config lacks {key}, expected {wanted}"]
    if found is not ABSENT and wanted is ABSENT:
        return [f"config must not have {key}"]
    return [f"{key} is {found}, expected {wanted}"] if found != wanted or type(found) is not type(wanted) else []


def _maps(known: Known) -> dict[str, tuple[Shape, torch.dtype]]:
    vocab_size = int(known.shape["vocab_size"])
    return {"d2t": ((known.draft_vocab_size,), torch.int64), "t2d": ((vocab_size,), torch.bool)}


def tensor_faults(tensors: Mapping[str, Tensor], wanted: Mapping[str, tuple[Shape, torch.dtype]]) -> list[str]:
    """Tensors that are missing, unknown, or of another shape or dtype."""
    faults = [f"missing tensor {name}" for name in sorted(wanted.keys() - tensors.keys())]
    faults += [f"unknown tensor {name}" for name in sorted(tensors.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & tensors.keys()):
        shape, dtype = wanted[name]
        tensor = tensors[name]
        if tuple(tensor.shape) != tuple(shape):
            faults.append(f"{name} has shape {list(tensor.shape)}, expected {list(shape)}")
        if tensor.dtype != dtype:
            faults.append(f"{name} is {tensor.dtype}, expected {dtype}")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            faults.append(f"{name} holds values that are not finite")
    return faults


def map_faults(tensors: Mapping[str, Tensor], known: Known) -> list[str]:
    """d2t must be offsets to ascending, unique target ids, and agree with t2d."""
    if "d2t" not in tensors or "t2d" not in tensors:
        return []
    ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    faults = id_faults(ids, known, "offsets")
    if not faults and not torch.equal(torch.nonzero(tensors["t2d"]).squeeze(1), ids):
        faults.append("t2d does not mark the ids that d2t maps to (zeros or absolute ids instead of offsets?)")
    return faults


def id_faults(ids: Tensor, known: Known, meaning: str) -> list[str]:
    """Target ids must ascend strictly, within the vocabulary."""
    faults, vocab_size = [], int(known.shape["vocab_size"])
    if not bool((ids[1:] > ids[:-1]).all()):
        faults.append(f"d2t, read as {meaning}, does not ascend strictly")
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        faults.append(f"d2t, read as {meaning}, must lie in 0..{vocab_size - 1}")
    return faults
