"""The tracker: offline without a key, online with one, and nothing at all with tracker=none."""

import json
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wandb
from wandb.proto import wandb_internal_pb2

from tests.train.conftest import ROOT, environment
from train.tracker import Tracker, TrackerConfig

WANDB = TrackerConfig(name="wandb", project="outrider-test")
BLOCK_BYTES = 32768
NONE = TrackerConfig(name="none", project="outrider-test")


def records(folder: Path) -> list[Any]:
    """Every record of the one offline run below `folder`, read from W&B's own file (a LevelDB log of one block)."""
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    content = path.read_bytes()
    assert content[:4] == b":W&B" and len(content) < BLOCK_BYTES
    found, position = [], 7  # behind the file's own header
    while position < len(content):
        _checksum, length, kind = struct.unpack_from("<IHB", content, position)
        assert kind == 1  # a whole record
        position += 7 + length
        found.append(wandb_internal_pb2.Record.FromString(content[position - length : position]))
    return found


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a real offline run of two logged steps."""
    folder = tmp_path_factory.mktemp("tracker") / "job"
    script = (
        "import sys; from pathlib import Path; from train.tracker import Tracker, TrackerConfig\n"
        "tracker = Tracker(TrackerConfig(name='wandb', project='outrider-test'), 'eagle3-tiny', Path(sys.argv[1]),\n"
        "                  {'seed': 3, 'optim': {'lr': 0.5}})\n"
        "tracker.log(1, {'loss': 2.5, 'loss/step': [1.5, 0.5, 0.25]})\n"
        "tracker.log(7, {'loss': 2.0, 'conditional_rates': [0.5, None]})\n"
        "tracker.finish()\n"
    )
    subprocess.run(
        [sys.executable, "-c", script, str(folder)], cwd=folder.parent, env=environment(), check=True, timeout=120
    )
    return folder


def history(folder: Path) -> list[dict[str, Any]]:
    return [
        {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
        for record in records(folder)
        if record.WhichOneof("record_type") == "history"
    ]


def test_without_a_key_a_real_offline_run_is_written_below_the_job_folder(offline: Path) -> None:
    (run,) = [record.run for record in records(offline) if record.WhichOneof("record_type") == "run"]
    assert (run.project, run.display_name) == ("outrider-test", "eagle3-tiny")
    settings = {update.key: json.loads(update.value_json) for update in run.config.update}
    assert (settings["seed"], settings["optim"]) == (3, {"lr": 0.5})
    assert not (offline.parent / "wandb").exists()


def test_lists_become_one_series_per_position(offline: Path) -> None:
    first, second = history(offline)
    assert {key: first[key] for key in first if not key.startswith("_")} == {
        "loss": 2.5, "loss/step_0": 1.5, "loss/step_1": 0.5, "loss/step_2": 0.25,
    }  # fmt: skip
    assert second["conditional_rates_0"] == 0.5
    assert "conditional_rates" not in second


def test_steps_are_those_of_training(offline: Path) -> None:
    assert [row["_step"] for row in history(offline)] == [1, 7]


class FakeRun:
    """Remembers how W&B was called."""

    def __init__(self) -> None:
        self.started: list[dict[str, Any]] = []

    def init(self, **settings: Any) -> "FakeRun":
        self.started.append(settings)
        return self

    def finish(self) -> None:
        pass


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    run = FakeRun()
    monkeypatch.setattr(wandb, "init", run.init)
    return run


@pytest.mark.parametrize(
    ("key", "mode", "expected"),
    [
        ("secret", None, "online"),
        (None, None, "offline"),
        ("secret", "offline", "offline"),
        ("secret", "disabled", "offline"),
        ("secret", "online", "online"),
        (None, "online", "offline"),
    ],
)
def test_online_exactly_where_there_is_a_key_and_nothing_forbids_it(
    fake: FakeRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: str | None, mode: str | None, expected: str
) -> None:
    monkeypatch.setattr(wandb, "api", SimpleNamespace(api_key=key))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if mode is not None:
        monkeypatch.setenv("WANDB_MODE", mode)
    Tracker(WANDB, "run", tmp_path / "job", {}).finish()
    (settings,) = fake.started
    assert (settings["mode"], settings["project"], settings["dir"]) == (expected, "outrider-test", tmp_path / "job")


@pytest.mark.parametrize(("key", "mode"), [("0123456789" * 4, "online"), (None, "offline")])
def test_key_of_the_environment_counts(tmp_path: Path, key: str | None, mode: str) -> None:
    script = (  # in a process of its own: W&B remembers the first key that it sees
        "import wandb; from pathlib import Path; from train.tracker import Tracker, TrackerConfig\n"
        "wandb.init = lambda **settings: print('mode', settings['mode'])\n"
        "Tracker(TrackerConfig(name='wandb', project='p'), 'run', Path('job'), {})"
    )
    given = {} if key is None else {"WANDB_API_KEY": key}
    home = {"NETRC": str(tmp_path / "no-netrc")}  # a developer's own login must not decide
    kept = {name: value for name, value in environment().items() if name != "WANDB_MODE"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=kept | given | home,
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"mode {mode}" in done.stdout.splitlines()


def test_resumed_job_continues_its_own_run_and_a_new_job_starts_another(fake: FakeRun, tmp_path: Path) -> None:
    for folder in ("one", "one", "two"):
        Tracker(WANDB, "same-name", tmp_path / folder, {}).finish()
    first, resumed, other = (settings["id"] for settings in fake.started)
    assert first == resumed != other
    assert {settings["resume"] for settings in fake.started} == {"allow"}


def test_none_starts_and_writes_nothing(fake: FakeRun, tmp_path: Path) -> None:
    tracker = Tracker(NONE, "run", tmp_path / "job", {})
    tracker.log(1, {"loss": 1.0, "loss/step": [1.0]})
    tracker.finish()
    assert fake.started == []
    assert list(tmp_path.iterdir()) == []


def test_none_does_not_even_import_wandb(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from train.tracker import Tracker, TrackerConfig\n"
        "Tracker(TrackerConfig(name='none', project=''), 'run', Path('job'), {}).finish()\n"
        "print('wandb' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
