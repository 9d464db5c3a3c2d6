"""What other code calls the tensors of a head: for training that starts from one (`Drafter.translate`)."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from conf import InputError

VOCABULARY = ("d2t", "t2d")
"""Read by whoever builds the drafter."""


def renamed(
    tensors: Mapping[str, Tensor], rules: Sequence[tuple[str, str]], unused: Sequence[str] = ()
) -> dict[str, Tensor]:
    """Tensors under our names.

    Args:
        tensors: as stored.
        rules: (pattern, replacement) of whole names; the first that fits is applied.
        unused: patterns of whole names that are left out, besides the vocabulary maps.

    Raises:
        InputError: if two names become one.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if any(re.fullmatch(pattern, name) for pattern in (*VOCABULARY, *unused)):
            continue
        pattern = next(((old, new) for old, new in rules if re.fullmatch(old, name)), None)
        ours = name if pattern is None else re.sub(pattern[0], pattern[1], name)
        if ours in found:
            raise InputError(f"the head has {ours} twice, once as {name}: which of them is meant?")
        found[ours] = tensor
    return found


def require_settings(stated: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Refuse a head that was trained with other settings than this run's.

    Raises:
        InputError: naming the first that differs, and what to set.
    """
    for name, value in stated.items():
        if value != ours[name]:
            wanted = str(list(value) if isinstance(value, tuple) else value).lower()
            wanted = wanted.replace(" ", "")
            raise InputError(f"the head was trained with {name}={wanted}: set drafter.{name}={wanted}")


def require_targets_embedding(tensors: Mapping[str, Tensor], embed_tokens: Tensor) -> None:
    """Refuse a head with an embedding of its own: ours is the target's.

    Raises:
        InputError: if it differs by more than rounding to bfloat16.
    """
    for name in ("embed_tokens.weight", "model.embed_tokens.weight"):
        if name in tensors:
            theirs, target = (part.to(torch.bfloat16) for part in (tensors[name], embed_tokens))
            if theirs.shape != target.shape or not torch.equal(theirs, target.to(theirs.device)):
                raise InputError(f"the head's {name} is not the target's embedding, which ours reads")
