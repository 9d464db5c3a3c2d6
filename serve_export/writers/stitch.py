"""The target's own folder with what training has changed in it: its MTP layer, or the matrices that Medusa-2 adapted.

Engines load it as they load the target.
"""

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from conf import InputError
from conf.records import read_safetensors


def stitch(target: Path, changed: Mapping[str, Tensor], folder: Path) -> None:
    """Copy the target's files; the tensors that training has changed get their new values, in the dtype that they had.

    Args:
        target: the target's folder, with safetensors.
        changed: under the names that they have there.
        folder: empty, to be filled.

    Raises:
        InputError: if there is no such folder, or it lacks one of them or has it in another shape.
    """
    _require_folder(target)
    new = {name: tensor.cpu() for name, tensor in changed.items()}
    shards = sorted(target.glob("*.safetensors"))
    where = {name: shard for shard in shards for name in _names(shard)}
    lacking = sorted(new.keys() - where.keys())
    if lacking:
        raise InputError(f"{target} has no {', '.join(lacking[:5])}: it is not the folder that the layer was read from")
    for file in sorted(target.iterdir()):
        if file.is_file() and file not in shards:
            shutil.copy2(file, folder / file.name)
    for shard in shards:
        part = {name: tensor for name, tensor in new.items() if where[name] == shard}
        if part:
            _rewrite(shard, part, folder / shard.name)
        else:
            shutil.copy2(shard, folder / shard.name)


def differences(target: Path, folder: Path, changed: Collection[str]) -> list[str]:
    """What the two folders differ in, besides the values of the tensors in `changed`: sentences.

    Raises:
        InputError: if one of them is not there.
    """
    _require_folder(target)
    faults: list[str] = []
    if (target / "config.json").read_bytes() != (folder / "config.json").read_bytes():
        faults.append("config.json is not the target's")
    for shard in sorted(target.glob("*.safetensors")):
        theirs = read_safetensors(shard, load_file)
        ours = read_safetensors(folder / shard.name, load_file)
        faults += [f"missing tensor {name}" for name in sorted(theirs.keys() - ours.keys())]
        faults += [f"unknown tensor {name}" for name in sorted(ours.keys() - theirs.keys())]
        for name in sorted(theirs.keys() & ours.keys()):
            old, new = theirs[name], ours[name]
            if (new.shape, new.dtype) != (old.shape, old.dtype):
                faults.append(f"{name} has shape {list(new.shape)} {new.dtype}, expected {list(old.shape)} {old.dtype}")
            elif name not in changed and not torch.equal(old, new):
                faults.append(f"{name} differs from the target's")
            elif not bool(new.isfinite().all()):
                faults.append(f"{name} holds values that are not finite")
    return faults


def _require_folder(target: Path) -> None:
    if not (target / "config.json").is_file():
        raise InputError(f"the target's own folder {target} is not here: name it with target_path=FOLDER")


def _names(shard: Path) -> list[str]:
    with safe_open(str(shard), framework="pt") as file:
        return list(file.keys())


def _rewrite(shard: Path, new: Mapping[str, Tensor], path: Path) -> None:
    tensors = load_file(shard)
    for name, tensor in new.items():
        if tensor.shape != tensors[name].shape:
            raise InputError(
                f"{shard}: {name} has shape {list(tensors[name].shape)}, the trained one {list(tensor.shape)}"
            )
        tensors[name] = tensor.to(tensors[name].dtype).contiguous()
    with safe_open(str(shard), framework="pt") as file:
        metadata = file.metadata()
    save_file(tensors, str(path), metadata=metadata)
