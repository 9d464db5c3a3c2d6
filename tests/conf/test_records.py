"""Files that jobs leave behind survive a crash whole, and metrics continue where a resumed run does."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from conf import InputError
from conf.records import JsonLines, provenance, read_json, read_safetensors, write_json, write_text


class PowerCut(Exception):
    pass


def cut_power(*_: Any, **__: Any) -> None:
    raise PowerCut


@pytest.mark.parametrize(("owner", "function"), [(os, "fsync"), (Path, "replace")])
def test_a_crash_while_writing_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, function: str
) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with monkeypatch.context() as patch:
        patch.setattr(owner, function, cut_power)
        with pytest.raises(PowerCut):
            write_text(path, "new and longer")
    assert path.read_text() == "old"
    write_text(path, "newest")  # what the crash left does not stand in the way
    assert path.read_text() == "newest"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]


def test_a_crash_while_first_writing_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", cut_power)
    with pytest.raises(PowerCut):
        write_text(tmp_path / "a.txt", "new")
    assert not (tmp_path / "a.txt").exists()


def test_contents_reach_the_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []

    def note(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            order.append((name, next(tmp_path.iterdir()).read_text()))
            return real(*arguments)

        return call

    monkeypatch.setattr(os, "fsync", note("fsync", os.fsync))
    monkeypatch.setattr(Path, "replace", note("replace", Path.replace))
    write_text(tmp_path / "a.txt", "text")
    assert order == [("fsync", "text"), ("replace", "text")]


def test_folders_are_made_and_json_reads_back(tmp_path: Path) -> None:
    value = {"a": [1, 2.5, None], "b": {"c": "ü"}}
    write_json(tmp_path / "x" / "y" / "a.json", value)
    assert read_json(tmp_path / "x" / "y" / "a.json") == value


def test_unreadable_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*nothing\.json: No such file"):
        read_json(tmp_path / "nothing.json")
    (tmp_path / "half.json").write_text('{"a": 1,\n "b": ')
    with pytest.raises(InputError, match=r"half\.json is no valid JSON \(Expecting value in line 2\)"):
        read_json(tmp_path / "half.json")


@pytest.mark.parametrize("keep_bytes", [0, 4, 40, -1])
def test_cut_safetensors_are_named(tmp_path: Path, keep_bytes: int) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"a": torch.arange(8.0)}, str(path))
    assert read_safetensors(path, load_file)["a"].tolist() == list(range(8))
    path.write_bytes(path.read_bytes()[:keep_bytes])
    with pytest.raises(InputError, match=r"w\.safetensors is truncated or no safetensors file"):
        read_safetensors(path, load_file)


def test_missing_safetensors_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"w\.safetensors does not exist"):
        read_safetensors(tmp_path / "w.safetensors", load_file)


def rows(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_are_on_disk_as_soon_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    lines = JsonLines(path, keep_until_step=0)
    for step in (1, 2):
        lines.write({"step": step, "loss": 0.5 / step})
        assert len(rows(path)) == step
    assert rows(path) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}]


def test_lines_after_the_resumed_step_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    before = JsonLines(path, keep_until_step=0)
    for step in (1, 2, 3, 4):
        before.write({"step": step, "run": "first"})
    JsonLines(path, keep_until_step=2).write({"step": 3, "run": "second"})
    assert rows(path) == [
        {"step": 1, "run": "first"}, {"step": 2, "run": "first"}, {"step": 3, "run": "second"},
    ]  # fmt: skip


def test_a_new_run_starts_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    JsonLines(path, keep_until_step=0).write({"step": 1})
    JsonLines(path, keep_until_step=0)
    assert path.read_text() == ""


WHOLE = '{"step": 2, "loss": 0.25, "time_share": {"target": 0.5, "other": 0.5}}'


@pytest.mark.parametrize("written", range(len(WHOLE)))
def test_a_half_written_last_line_is_dropped(tmp_path: Path, written: int) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "loss": 0.5}\n' + WHOLE[:written])
    JsonLines(path, keep_until_step=5).write({"step": 2, "loss": 0.125})
    assert rows(path) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.125}]


def test_a_whole_last_line_without_its_line_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "loss": 0.5}\n' + WHOLE)
    JsonLines(path, keep_until_step=5).write({"step": 3})
    assert rows(path) == [{"step": 1, "loss": 0.5}, json.loads(WHOLE), {"step": 3}]


def test_provenance_names_commit_command_and_versions() -> None:
    found = provenance()
    assert found["git_commit"] is None or len(found["git_commit"]) == 40
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"].keys() == {"torch", "transformers", "deepspeed", "outrider"}
    assert found["command"]
    assert json.loads(json.dumps(found)) == found
