"""Files that jobs leave behind: written whole or not at all, so that a crash never leaves half a file."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from conf import InputError


def write_text(path: Path, text: str) -> None:
    """Write under a temporary name, flush to disk, rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.writing")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_json(path: Path, value: Any) -> None:
    """`write_text` of indented JSON."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> Any:
    """Parse a JSON file.

    Raises:
        InputError: if it is missing or no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{path} is no valid JSON ({error.msg} in line {error.lineno})") from error


def read_safetensors(path: Path, read: Callable[[str], Any]) -> Any:
    """Call a safetensors reader on `path`, with its errors in one sentence.

    Raises:
        InputError: if the file is missing, truncated or no safetensors.
    """
    from safetensors import SafetensorError

    if not path.is_file():
        raise InputError(f"{path} does not exist")
    try:
        return read(str(path))
    except SafetensorError as error:
        raise InputError(f"{path} is truncated or no safetensors file ({error})") from error


def provenance() -> dict[str, Any]:
    """Where a result came from: command, source commit, versions."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "git_commit": commit or None,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "transformers", "deepspeed", "outrider")},
    }


class JsonLines:
    """An append-only metrics file: one JSON object per line, each with its `step`."""

    def __init__(self, path: Path, keep_until_step: int) -> None:
        """Open `path`, dropping lines after `keep_until_step` (a resumed run writes them again)."""
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        if lines and not _is_whole(lines[-1]):  # cut short by a crash
            lines.pop()
        kept = [line for line in lines if json.loads(line)["step"] <= keep_until_step]
        write_text(path, "".join(line + "\n" for line in kept))
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: dict[str, Any]) -> None:
        """Append one line and flush it."""
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()


def _is_whole(line: str) -> bool:
    try:
        json.loads(line)
    except json.JSONDecodeError:
        return False
    return True
