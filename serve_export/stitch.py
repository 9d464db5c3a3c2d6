"""A target's folder with its own MTP layer replaced by the trained one: engines load it as they load the target."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from conf import InputError
from train.drafters.base import Servable


def stitch(target: Path, servable: Servable, folder: Path) -> list[str]:
    """Copy the target's files; tensors of the MTP layer get their trained values, in the dtype that they had.

    Args:
        target: the target's folder, with safetensors.
        servable: of a native MTP layer: tensors under the target's own names.
        folder: empty, to be filled.

    Returns:
        The names that were replaced.

    Raises:
        InputError: if the drafter is no native MTP layer, or the target's folder lacks one of its tensors.
    """
    if servable.architecture != "native_mtp":
        raise InputError(
            f"stack=target writes trained MTP layers back into their target, this is a {servable.architecture} head: "
            "train with drafter=mtp drafter.native=true, or export with stack=vllm"
        )
    new = {name: tensor.cpu() for name, tensor in servable.tensors.items() if name != "draft_to_target_ids"}
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
    verify(target, folder, new)
    return sorted(new)


def verify(target: Path, folder: Path, new: Mapping[str, Tensor]) -> None:
    """Nothing but the given tensors may differ between the two folders.

    Raises:
        InputError: naming what does.
    """
    for shard in sorted(target.glob("*.safetensors")):
        theirs, ours = load_file(shard), load_file(folder / shard.name)
        for name, tensor in theirs.items():
            wanted = new[name].to(tensor.dtype) if name in new else tensor
            if name not in ours or ours[name].dtype != tensor.dtype or not torch.equal(ours[name], wanted):
                raise InputError(f"{folder / shard.name} holds another {name} than it should")
        if theirs.keys() != ours.keys():
            raise InputError(f"{folder / shard.name} holds tensors that {shard} has not")


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
