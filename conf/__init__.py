"""Configuration: yaml files hold the values, frozen dataclasses hold the meaning.

Every yaml in this package names its dataclass on its first line (`_target_`); the dataclass lives beside the code
that it configures. `config` makes such a dataclass; `conf.cli` composes the yaml files and turns them into one
validated job.
"""

from typing import TypeVar, cast, dataclass_transform

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

T = TypeVar("T")


class InputError(ValueError):
    """What the user gave cannot be used: a command ends with this one sentence and exit code 2."""


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(Field,))
def config(cls: type[T]) -> type[T]:
    """Make `cls` a frozen, keyword-only dataclass that refuses unknown keys and wrong types."""
    return cast(type[T], dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))(cls))
