"""Tiny training runs, as many as the tests want, for the price of one import of DeepSpeed.

`launcher` keeps a process that has imported everything and computed nothing; each command runs in a fork of it, with
its own arguments, working directory, ranks and end. To the command it looks like `python -m train ...` (or what
torchrun starts): `__main__` runs, exit codes are real, and a SIGKILL kills.
"""

import functools
import importlib
import json
import os
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "WANDB_API_KEY")
JOBS = ("train.job", "eval.job", "serve_export.job")
TINY = (
    "+target=qwen3", "drafter=eagle3", "target.name=tiny", "target.dtype=float32", "target.chat_template_kwargs={}",
    "precision=float32", "corpus=jsonl", "drafter.draft_vocab_size=200", "data.pack_tokens=256", "data.max_tokens=256",
    "epochs=2", "validation_conversations=2", "validation_tokens=12", "tracker=none",
    "drafter.train_lm_head=true", "drafter.step_loss_decay=1.0", "drafter.row_keep_ratio=1.0",
    # In bf16 the rounding of Muon's orthogonalisation alone would move ZeRO-3's curve by 1e-4.
    "optim.ns_method=gram",
)  # fmt: skip


def environment() -> dict[str, str]:
    """This process's environment without what would tie a command to it."""
    kept = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    # On CPUs with fp16 DeepSpeed's Muon would orthogonalise in it, which alone moves ZeRO-3's curve by 1e-4.
    exact = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "OMP_NUM_THREADS": "1"}
    return kept | exact | {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "PYTHONPATH": str(ROOT)}


def command(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command line in a process of its own; `python` is this interpreter."""
    cwd.mkdir(parents=True, exist_ok=True)
    program = sys.executable if argv[0] == "python" else str(Path(sys.executable).with_name(argv[0]))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [program, *argv[1:]], cwd=cwd, env=environment() | {"PATH": path}, capture_output=True, text=True, check=False,
        timeout=180,
    )  # fmt: skip


@dataclass(frozen=True)
class Finished:
    """A command that has ended."""

    codes: list[int]
    """Exit code of each rank; -9 after SIGKILL."""
    out: str
    err: str

    @property
    def code(self) -> int:
        """The exit code of rank 0."""
        return self.codes[0]

    def succeeded(self) -> "Finished":
        """Itself, if every rank ended with 0."""
        assert set(self.codes) == {0}, f"exit codes {self.codes}\n{self.out[-2000:]}\n{self.err[-4000:]}"
        return self


class Launcher:
    """Runs commands in forks of one process; that process ends with this one."""

    def __init__(self) -> None:
        start = f"import runpy; runpy.run_path({__file__!r})['serve']()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", start], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env=environment(), stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def __call__(
        self, module: str, argv: list[str], cwd: Path, ranks: int = 1, kill: tuple[str, int] | None = None
    ) -> Finished:
        """Run `python -m module *argv` in `cwd`.

        Args:
            module: train, eval or serve_export.
            argv: overrides.
            cwd: where.
            ranks: processes of one run.
            kill: (function, n): SIGKILL at the n-th call of that function, before it does anything.
        """
        cwd.mkdir(parents=True, exist_ok=True)
        request = {"module": module, "argv": argv, "cwd": str(cwd), "ranks": ranks, "kill": kill}
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        while not (line := stdout.readline()).startswith("{"):
            assert line, "the launcher's process ended"
        return Finished(**json.loads(line))


@functools.cache
def shared_launcher() -> Launcher:
    """One launcher for all test folders."""
    return Launcher()


def serve() -> None:
    """The launcher's process: read requests, fork, answer. Nothing is computed here, so that forking is safe."""
    for name in (*JOBS, "torch._dynamo", "transformers.models.llama.modeling_llama"):
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        with tempfile.TemporaryDirectory() as logs:
            pids = [_fork(request, rank, port, Path(logs)) for rank in range(request["ranks"])]
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
            out, err = (Path(logs, f"{name}-0").read_text(errors="replace") for name in ("out", "err"))
        print(json.dumps({"codes": codes, "out": out, "err": err}), flush=True)


def _fork(request: dict[str, Any], rank: int, port: str, logs: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(logs / f"{name}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.chdir(request["cwd"])
        if request["ranks"] > 1:
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": request["ranks"], "MASTER_PORT": port}
            os.environ.update({key: str(value) for key, value in place.items()}, MASTER_ADDR="127.0.0.1")
        if request["kill"] is not None:
            _kill_at(*request["kill"])
        sys.argv = [request["module"], *request["argv"]]
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _kill_at(function: str, count: int) -> None:
    """Replace `function` (dotted) by one that SIGKILLs this process at call `count` (1-based)."""
    owner_name, _, name = function.rpartition(".")
    owner = pkgutil.resolve_name(owner_name)
    original = getattr(owner, name)
    calls = iter(range(1, 1 << 30))

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, wrapper)


def write_corpus(path: Path, count: int = 14) -> Path:
    """`count` short conversations of ASCII text, of differing lengths."""
    lines = [
        {"messages": [
            {"role": "user", "content": f"What is {i} and {i * 7 % 5}?"},
            {"role": "assistant", "content": f"It is {i * 3}, of course {'very ' * (i % 4)}clear."},
        ]}
        for i in range(count)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def rows(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl of a run."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def losses(run: Path) -> list[float]:
    """Its loss curve."""
    return [row["loss"] for row in rows(run)]


@pytest.fixture(scope="session")
def launcher() -> Launcher:
    """launcher(module, argv, cwd, ranks, kill) -> Finished."""
    return shared_launcher()


@pytest.fixture(scope="session")
def tiny_args(tiny_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """tiny_args(output, *more) -> overrides of a tiny EAGLE-3 run on a random Qwen3."""
    corpus = write_corpus(tmp_path_factory.mktemp("corpus") / "talk.jsonl")

    def make(output: Path, *more: str) -> list[str]:
        return [*TINY, f"target.path={tiny_folder('qwen3')}", f"corpus.path={corpus}", f"output_dir={output}", *more]

    return make
