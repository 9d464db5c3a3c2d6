"""Nested training state <-> one safetensors file: resuming never unpickles anything.

Tensors go into the safetensors body, the structure around them as JSON into its metadata.
"""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from conf import InputError
from conf.records import read_safetensors

Json = Any


def save_state(state: Any, path: Path) -> None:
    """Write `state`: dicts, lists, tuples, sets, numbers, strings, None, dtypes, torch.Size and tensors.

    Raises:
        TypeError: for any other type, naming where it stands.
    """
    import json

    tensors: dict[str, Tensor] = {}
    structure = _encode(state, "state", tensors)
    save_file(tensors, str(path), metadata={"structure": json.dumps(structure)})


def load_state(path: Path) -> Any:
    """Read what `save_state` wrote.

    Raises:
        InputError: if the file is missing or damaged.
    """
    import json

    def read(name: str) -> Any:
        with safe_open(name, framework="pt") as file:
            metadata = file.metadata() or {}
            if "structure" not in metadata:
                raise InputError(f"{path} is not a training state of ours")
            structure = json.loads(metadata["structure"])
            return _decode(structure, {key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118

    return read_safetensors(path, read)


def _encode(value: Any, where: str, tensors: dict[str, Tensor]) -> Json:
    if isinstance(value, Tensor):
        name = f"{len(tensors)} {where}"  # the number: two places may read alike
        tensors[name] = value.detach().cpu().contiguous().clone()  # clone: safetensors refuses shared storage
        return {"tensor": name}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.Size):
        return {"size": list(value)}
    if isinstance(value, dict):
        items = [
            [_encode(key, where, tensors), _encode(entry, f"{where}.{key}", tensors)] for key, entry in value.items()
        ]
        return {"ordered" if isinstance(value, OrderedDict) else "dict": items}
    for kind, name in ((list, "list"), (tuple, "tuple"), (set, "set")):
        if isinstance(value, kind):
            return {name: [_encode(entry, f"{where}.{index}", tensors) for index, entry in enumerate(value)]}
    raise TypeError(f"cannot save {type(value).__name__} at {where} in a checkpoint")


def _decode(node: Json, tensors: dict[str, Tensor]) -> Any:
    ((kind, content),) = node.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "value":
        return content
    if kind == "dtype":
        return getattr(torch, content)
    if kind == "size":
        return torch.Size(content)
    if kind in ("dict", "ordered"):
        pairs = [(_decode(key, tensors), _decode(entry, tensors)) for key, entry in content]
        return OrderedDict(pairs) if kind == "ordered" else dict(pairs)
    entries = [_decode(entry, tensors) for entry in content]
    return {"list": list, "tuple": tuple, "set": set}[kind](entries)
