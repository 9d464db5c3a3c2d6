"""Every drafter family of conf/drafter, tiny: tests that know none of them by name."""

import dataclasses
from pathlib import Path
from typing import Any, get_type_hints

import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from train.drafters.base import Drafter, DrafterConfig

FOLDER = Path(__file__).parents[1] / "conf" / "drafter"


def settings_of(name: str, **changes: Any) -> DrafterConfig:
    """The values of conf/drafter/NAME.yaml, some of them changed; what the family does not have is left out."""
    settings: DrafterConfig = instantiate(OmegaConf.load(FOLDER / f"{name}.yaml"))
    known = {field.name for field in dataclasses.fields(settings)}
    return dataclasses.replace(settings, **{key: value for key, value in changes.items() if key in known})


def is_trained(name: str) -> bool:
    return issubclass(get_type_hints(type(settings_of(name)).build)["return"], Drafter)


NAMES = [name for name in sorted(path.stem for path in FOLDER.glob("*.yaml")) if is_trained(name)]
"""Families that are trained."""


def tiny_family(
    name: str, target: Any, draft_vocab_size: int | None = None, noise: float = 0.2, seed: int = 0, **changes: Any
) -> Any:
    """A drafter of this family for a tiny target and in its dtype, with noise on every weight, so that no test passes
    because something is zero."""
    vocab = target.hf_config.vocab_size
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(vocab, generator=generator)[: draft_vocab_size or vocab].sort().values
    drafter: Any = settings_of(name, draft_vocab_size=draft_vocab_size, init_seed=seed, **changes).build(
        target.parts, ids
    )
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    return drafter.to(target.model.dtype)


def longest_chain(drafter: Any, wanted: int) -> int:
    """At most `wanted`; drafters with a head per position have no more than these."""
    return min(wanted, drafter.max_draft_tokens or wanted)


def as_served(target: Any, drafter: Any) -> Any:
    """The target that the drafter has learned to draft for: itself, or what training has made of it."""
    changed = drafter.changed_target()
    return target if changed is None else target.with_model(changed)
