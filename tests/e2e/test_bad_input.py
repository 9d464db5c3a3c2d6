"""Whatever the user gets wrong: exit code 2, one sentence that says what to do, and nothing half-written."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conf.cli import launch
from tests.train.conftest import Launcher, command

Args = Callable[..., list[str]]
GOOD = {"messages": [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hello."}]}


def assert_one_sentence(code: int, err: str, *parts: str) -> None:
    assert code == 2, err[-3000:]
    assert "Traceback" not in err
    (line,) = [line for line in err.splitlines() if line.startswith("error:")]
    for part in parts:
        assert part in line, line


def everything(folder: Path) -> set[str]:
    """Files and folders, empty ones and hidden ones too."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def trained(launcher: Launcher, tiny_args: Args, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    folder = tmp_path_factory.mktemp("trained")
    launcher("train", tiny_args(folder / "run", "epochs=1", "validation_tokens=4"), folder).succeeded()
    return folder / "run"


# --- the command line: refused before anything is loaded --------------------------------------------------------------


@pytest.mark.parametrize(
    ("job", "argv", "parts"),
    [
        ("train", ["+target=qwen3", "drafter=eagle2"], ["unknown drafter 'eagle2'", "did you mean 'eagle3'?"]),
        ("train", ["+target=qwen3", "drafter.ttt_step=3"], ["drafter.ttt_step'", "did you mean 'drafter.ttt_steps'?"]),
        (
            "train",
            ["+target=qwen3", "deepspeed=zero4"],
            ["unknown deepspeed 'zero4'", "zero0", "zero2_offload", "zero3"],
        ),
        ("train", [], ["no target", "+target=llama3", "+target=qwen3", "+target=qwen3_moe", "+target=smollm2"]),
        ("train", ["target=qwen3"], ["+target=qwen3"]),
        ("train", ["+target=qwen4"], ["unknown target 'qwen4'", "did you mean 'qwen3'?"]),
        ("train", ["+target=qwen3", "epochs"], ["'epochs'", "key=value"]),
        ("train", ["+target=qwen3", "corpus=jsonl"], ["corpus.path="]),
        ("serve_export", ["checkpoint=x", "stack=vlm"], ["unknown stack 'vlm'", "did you mean 'vllm'?"]),
        ("eval", ["checkpoint=x", "sampling.temprature=1"], ["did you mean 'sampling.temperature'?"]),
    ],
)
def test_command_line_that_composes_to_nothing(
    job: str, argv: list[str], parts: list[str],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [job, *argv])
    with pytest.raises(SystemExit) as end:
        launch(job, lambda composed: pytest.fail("the job was started"))
    assert_one_sentence(end.value.code, capsys.readouterr().err, *parts)
    assert everything(tmp_path) == set()


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["+drafter.foo=1"], ["drafter.foo"]),
        (["epochs=abc"], ["epochs", "number", "'abc'"]),
        (["epochs=0"], ["epochs", "greater than 0", "0"]),
        (["precision=float16"], ["precision", "'float32' or 'bfloat16'", "'float16'"]),
        (["data.packing=perhaps"], ["data.packing", "'perhaps'"]),
        (["optim.betas=[0.9]"], ["optim.betas"]),
        (["target.path=Qwen/Qwen3-8B"], ["'Qwen/Qwen3-8B'", "target.path="]),
        (["data.max_tokens=100000"], ["data.max_tokens=100000", "512"]),
        (["drafter.draft_vocab_size=300"], ["300", "258", "drafter.draft_vocab_size"]),
        (["drafter.draft_vocab_size=1"], ["drafter.draft_vocab_size"]),
        (["drafter.aux_layers=[2,9]"], ["drafter.aux_layers", "[2, 9]"]),
        (["drafter.init_layer=12"], ["drafter.init_layer"]),
        (["validation_conversations=99"], ["validation_conversations=99", "14"]),
        (["data.global_batch_packs=3", "data.micro_batch_packs=2"], ["data.global_batch_packs=3"]),
        (["data.max_tokens=8"], ["talk.jsonl:", "data.max_tokens=8"]),
        (["corpus.path=nowhere.jsonl"], ["nowhere.jsonl", "corpus.path="]),
        (["validation_tokens=600"], ["validation_tokens", "512"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and "=" in value[0] else "",
)
def test_training_settings_that_do_not_fit(
    launcher: Launcher, tiny_args: Args, tmp_path: Path, argv: list[str], parts: list[str]
) -> None:
    done = launcher("train", [*tiny_args(tmp_path / "out"), *argv], tmp_path)
    assert_one_sentence(done.code, done.err, *parts)
    assert everything(tmp_path) == set()


# --- the corpus -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"", ["corpus.jsonl", "no conversation"]),
        (b"\n \n", ["corpus.jsonl", "no conversation"]),
        ([GOOD, {"messages": [GOOD["messages"][0]]}], ["corpus.jsonl:2", "no assistant message"]),
        ([GOOD, GOOD, {"messages": [{"role": "bot", "content": "x"}]}], ["corpus.jsonl:3", "'bot'", "assistant"]),
        ([GOOD, {"messages": [{"content": "x"}]}], ["corpus.jsonl:2", "role"]),
        ([GOOD, {"messages": [{"role": "user"}]}], ["corpus.jsonl:2", "content"]),
        ([GOOD, {"messages": []}], ["corpus.jsonl:2", "messages"]),
        ([GOOD, {"text": "x"}], ["corpus.jsonl:2", "messages"]),
        ([GOOD, {"messages": [GOOD["messages"][1]]}], ["corpus.jsonl:2", "starts with an answer"]),
        (json.dumps(GOOD).encode() + b'\n{"messages": [\n', ["corpus.jsonl:2", "invalid JSON"]),
        (json.dumps(GOOD).encode() + b"\nplain text\n", ["corpus.jsonl:2", "invalid JSON"]),
        (b"\x89PNG\r\n\x1a\n\x00\x00\xff\xfe", ["corpus.jsonl"]),
        (b"PAR1\x15\x04\x15\x80\xff\xd0", ["corpus.jsonl"]),
    ],
    ids=[
        "empty", "blank lines", "no answer", "wrong role", "no role", "no content", "no messages", "other keys",
        "answer first", "cut JSON", "no JSON", "an image", "a parquet file",
    ],
)  # fmt: skip
def test_corpus_that_cannot_be_learned_from(
    launcher: Launcher, tiny_args: Args, tmp_path: Path, content: Any, parts: list[str]
) -> None:
    if isinstance(content, list):
        content = "".join(json.dumps(row) + "\n" for row in content).encode()
    (tmp_path / "corpus.jsonl").write_bytes(content)
    argv = [*tiny_args(tmp_path / "out"), "corpus.path=corpus.jsonl", "validation_conversations=0"]
    done = launcher("train", argv, tmp_path)
    assert_one_sentence(done.code, done.err, *parts)
    assert everything(tmp_path) == {"corpus.jsonl"}


def test_folder_as_a_corpus(launcher: Launcher, tiny_args: Args, tmp_path: Path) -> None:
    done = launcher("train", [*tiny_args(tmp_path / "out"), f"corpus.path={tmp_path}"], tmp_path)
    assert_one_sentence(done.code, done.err, str(tmp_path), "corpus.path=")


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["eval", "serve_export"])
def test_checkpoint_of_another_target(
    launcher: Launcher, trained: Path, tiny_folder: Callable[..., Path], tmp_path: Path, module: str
) -> None:
    other = tiny_folder("qwen3", seed=1)
    done = launcher(module, [f"checkpoint={trained}", f"target_path={other}"], tmp_path)
    assert_one_sentence(done.code, done.err, "trained for target tiny", "weights_sha256", "use the target")
    assert everything(tmp_path) == set()


@pytest.mark.parametrize("module", ["eval", "serve_export"])
@pytest.mark.parametrize(
    ("fault", "parts"),
    [
        ("truncated", ["model.safetensors", "truncated"]),
        ("missing", ["model.safetensors", "does not exist"]),
        ("format", ["checkpoint format 2"]),
        ("target gone", ["'/gone'", "target_path="]),
    ],
)
def test_damaged_checkpoint(
    launcher: Launcher, trained: Path, tmp_path: Path, module: str, fault: str, parts: list[str]
) -> None:
    folder = Path(shutil.copytree(trained / "checkpoints" / "best", tmp_path / "copy"))
    path = folder / "model.safetensors"
    if fault == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    elif fault == "missing":
        path.unlink()
    elif fault == "format":
        manifest = folder / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
    else:
        lines = (folder / "config.yaml").read_text().splitlines()
        lines = ["  path: /gone" if line.startswith("  path: ") and "qwen3" in line else line for line in lines]
        (folder / "config.yaml").write_text("\n".join(lines))
    before = everything(tmp_path)
    done = launcher(module, [f"checkpoint={folder}"], tmp_path)
    assert_one_sentence(done.code, done.err, *parts)
    assert everything(tmp_path) == before


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["dtype=float16"], ["dtype", "'float16'"]),
        (["num_draft_tokens=0"], ["num_draft_tokens"]),
        (["max_tokens=600"], ["512"]),
        (["corpus=jsonl", "corpus.path=nowhere.jsonl"], ["nowhere.jsonl"]),
    ],
)
def test_evaluation_settings_that_do_not_fit(
    launcher: Launcher, trained: Path, tmp_path: Path, argv: list[str], parts: list[str]
) -> None:
    done = launcher("eval", [f"checkpoint={trained}", *argv], tmp_path)
    assert_one_sentence(done.code, done.err, *parts)
    assert everything(tmp_path) == set()


# --- the same from a real shell ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["train", "+target=qwen3", "drafter=eagle2"], ["did you mean 'eagle3'?"]),
        (["train", "+target=qwen3", "tracker=none"], ["'Qwen/Qwen3-8B'", "model hub", "target.path="]),
        (["eval", "checkpoint=nonsense"], ["nonsense is no checkpoint", "checkpoint="]),
    ],
)
def test_real_commands_end_with_code_2_and_one_sentence(tmp_path: Path, argv: list[str], parts: list[str]) -> None:
    done = command("python", "-m", *argv, cwd=tmp_path)
    assert_one_sentence(done.returncode, done.stderr, *parts)
    assert everything(tmp_path) == set()
