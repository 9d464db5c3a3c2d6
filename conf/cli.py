"""From a command line to one validated job: `launch` is the body of every `python -m <job>`.

Hydra composes the yaml files, pydantic checks the values. Whatever the user got wrong ends in one sentence on stderr
and exit code 2; anything else is a bug and keeps its traceback.
"""

import dataclasses
import difflib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    InstantiationException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from conf import InputError

OmegaConf.register_new_resolver(
    "run_name_of",
    lambda checkpoint, drafter="none", target="none": (
        f"{Path(str(drafter)).name}-{target}" if checkpoint in (None, "None") else run_name_of(str(checkpoint))
    ),
    replace=True,
)

USAGE_ERROR = 2
"""Exit code for anything the user can mend."""


def run_name_of(checkpoint: str) -> str:
    """The training run behind a checkpoint path, for output folders: RUN, or RUN-step-000100 for one of its steps."""
    path = Path(checkpoint)
    return f"{path.parts[-3]}-{path.name}" if len(path.parts) >= 3 and path.parent.name == "checkpoints" else path.name


def launch(job_name: str, run: Callable[[DictConfig], None]) -> None:
    """Compose conf/<job_name>.yaml with the command line and call `run` (once per combination under `-m`).

    Args:
        job_name: train, eval, ...
        run: gets the composed configuration; use `build` on it.
    """
    flags = [argument for argument in sys.argv[1:] if argument.startswith("-")]
    if not flags:  # with flags (--help, --cfg, -m) Hydra answers by itself
        try:
            check_overrides(job_name, sys.argv[1:])
        except InputError as error:
            fail(error)

    @hydra.main(config_path="pkg://conf", config_name=job_name, version_base="1.3")
    def main(composed: DictConfig) -> None:
        try:
            run(composed)
        except InputError as error:
            fail(error)

    main()


def fail(error: Exception) -> NoReturn:
    """Print `error` on rank 0 and leave with exit code 2."""
    if os.environ.get("RANK", "0") == "0":
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
    raise SystemExit(USAGE_ERROR)


def check_overrides(job_name: str, overrides: list[str]) -> DictConfig:
    """Compose the configuration, turning Hydra's errors into one sentence with the nearest valid name.

    Raises:
        InputError: unknown group choice, unknown key, malformed override, or a missing `+target`.
    """
    GlobalHydra.instance().clear()
    with initialize_config_module("conf", version_base="1.3", job_name=job_name):
        try:
            composed = compose(job_name, overrides=overrides)
        except MissingConfigException as error:
            wanted = str(error.missing_cfg_file or "")
            raise InputError(_unknown_choice(wanted, error.options or [])) from error
        except OverrideParseException as error:
            raise InputError(f"cannot read the argument {error.override!r}: write key=value") from error
        except ConfigCompositionException as error:
            raise InputError(_bad_override(error, compose(job_name, overrides=_with_target(job_name)))) from error
        except HydraException as error:
            raise InputError(str(error).splitlines()[0]) from error
        except OmegaConfBaseException as error:
            raise InputError(str(error).splitlines()[0]) from error
        if _with_target(job_name) and "target" not in composed:
            raise InputError(f"no target: add one of {', '.join(f'+target={name}' for name in choices('target'))}")
        raw = OmegaConf.to_container(composed, resolve=False)
        missing = [key for key, value in _flat(raw) if value == "???"]
        if missing:
            raise InputError(f"missing: {', '.join(f'{key}=...' for key in missing)}")
    return composed


def choices(group: str) -> list[str]:
    """The yaml files of a config group, by name."""
    from importlib.resources import files

    return sorted(
        path.name.removesuffix(".yaml") for path in files("conf").joinpath(group).iterdir() if path.name[-5:] == ".yaml"
    )


def build(composed: DictConfig) -> Any:
    """Turn a composed configuration into the validated dataclass that its `_target_` names.

    Raises:
        InputError: naming the key, what was expected and what came.
    """
    OmegaConf.resolve(composed)
    try:
        return hydra.utils.instantiate(composed, _convert_="all")
    except InstantiationException as error:
        raise InputError(_invalid_value(error)) from error


def rebuild(section: DictConfig, allowed: tuple[str, ...]) -> Any:
    """Rebuild one dataclass from a checkpoint's configuration, which may come from anywhere: nothing else is run.

    Args:
        section: its yaml section, `_target_` included.
        allowed: prefixes of the modules that may be named.

    Raises:
        InputError: if the section names anything but a configuration class of ours, or its values are wrong.
    """
    container = OmegaConf.to_container(section, resolve=True)
    assert isinstance(container, dict)  # a section is a mapping
    fields = {str(key): value for key, value in container.items()}
    name = str(fields.pop("_target_", ""))
    module, _, class_name = name.rpartition(".")
    if not name.startswith(allowed):
        raise InputError(f"the checkpoint's config names {name!r}, expected something under {' or '.join(allowed)}")
    try:
        found = getattr(importlib.import_module(module), class_name, None)
    except ImportError as error:
        raise InputError(f"the checkpoint's config names {name!r}, which does not exist") from error
    if not (isinstance(found, type) and dataclasses.is_dataclass(found) and found.__module__ == module):
        raise InputError(f"the checkpoint's config names {name!r}, which is no configuration class")
    if any(key.rsplit(".", 1)[-1].startswith("_") for key, _ in _flat(fields)):
        raise InputError(f"the checkpoint's config of {name!r} holds a key that starts with an underscore")
    try:
        return found(**fields)
    except (ValidationError, TypeError) as error:
        raise InputError(f"the checkpoint's config does not fit {name}: {str(error).splitlines()[0]}") from error


def _unknown_choice(wanted: str, options: Sequence[str]) -> str:
    group, _, choice = wanted.rpartition("/")
    known = ", ".join(sorted(options))
    return f"unknown {group or 'config'} {choice!r}{_nearest(choice, options)} (choices: {known})"


def _with_target(job_name: str) -> list[str]:
    """A `+target=` that completes the job's configuration, for the jobs that need one."""
    return [f"+target={choices('target')[0]}"] if job_name in ("train", "data") else []


def _bad_override(error: ConfigCompositionException, complete: DictConfig) -> str:
    first = str(error).splitlines()[0]
    quoted = first.split("'")
    if len(quoted) < 2:
        return first[:200]
    argument = quoted[1]
    if first.startswith("Ambiguous value"):
        return f"{argument} is a sweep: add -m to run all of its values"
    key = argument.lstrip("+~").split("=")[0]
    if key in ("target", "experiment"):
        return f"{key} is added to the command, not changed: write {', '.join(f'+{key}={n}' for n in choices(key))}"
    return f"unknown key {key!r}{_nearest(key, [key for key, _ in _flat(OmegaConf.to_container(complete))])}"


def _nearest(name: str, valid: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f": did you mean {close[0]!r}?" if close else ""


def _flat(node: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """(dotted key, value) of everything below `node`, inner mappings included."""
    if not isinstance(node, dict):
        return []
    pairs = []
    for key, value in node.items():
        pairs += [(f"{prefix}{key}", value), *_flat(value, f"{prefix}{key}.")]
    return pairs


def _invalid_value(error: InstantiationException) -> str:
    cause = error.__cause__
    if isinstance(cause, InputError):
        return str(cause)
    if not isinstance(cause, ValidationError):
        return str(error).splitlines()[0]
    details = cause.errors()[0]
    where = str(error).rsplit("full_key: ", 1)
    prefix = where[1].splitlines()[0] + "." if len(where) == 2 else ""
    key = prefix + ".".join(str(part) for part in details["loc"] if isinstance(part, str | int))
    return f"{key}: {details['msg'][:1].lower()}{details['msg'][1:]}, got {details['input']!r}"
