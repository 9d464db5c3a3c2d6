"""What the serving tests share: our commands, real vLLM in its own environment, and one record per drafter.

Several processes may run them at once (`--dist loadfile`): each has a core of its own, and its own files.
"""

import hashlib
import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

ROOT = Path(__file__).parents[2]
OUTPUT = ROOT / "outputs" / "test-serving"
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
VERSION = "0.32.0"


@dataclass(frozen=True)
class Decoded:
    """What our own decoder made of some prompts."""

    summary: dict[str, Any]
    prompts: list[list[int]]
    answers: list[list[int]]


class Served:
    """Both sides of a comparison, and the record of it."""

    def __init__(self) -> None:
        self.output = OUTPUT
        (OUTPUT / "rows").mkdir(parents=True, exist_ok=True)

    def command(self, *arguments: str) -> None:
        """Run one of our commands from the checkout."""
        subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, check=True)

    def evaluate(self, name: str, *arguments: str) -> Decoded:
        """Decode with our decoder."""
        folder = OUTPUT / f"{name}-eval"
        self.command("eval", "plain_prompts=0", f"output_dir={folder}", *arguments)
        return self.decoded(folder)

    def decoded(self, folder: Path) -> Decoded:
        """What `python -m eval` has left in a folder."""
        rows = json.loads((folder / "rounds.json").read_text()).values()
        return Decoded(
            json.loads((folder / "summary.json").read_text()),
            [row["prompt"] for row in rows],
            [row["tokens"] for row in rows],
        )

    def export(self, name: str, checkpoint: str, *arguments: str) -> tuple[str, dict[str, Any]]:
        """(target, speculative config) of the serve command that the export ends with."""
        folder = OUTPUT / name
        self.command("serve_export", f"checkpoint={checkpoint}", f"output_dir={folder}", *arguments)
        words = shlex.split(json.loads((folder / "export.json").read_text())["serve_command"])
        assert words[:2] == ["vllm", "serve"]
        return words[2], json.loads(words[words.index("--speculative-config") + 1])

    def vllm(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        """Serve with real vLLM; its log stays beside the result."""
        if not VLLM_PYTHON.exists():
            pytest.skip("no vLLM environment: run `make test-serving`")
        asked, answered = OUTPUT / f"{name}.request.json", OUTPUT / f"{name}.result.json"
        asked.write_text(json.dumps({"batch": 8, **request}))
        answered.unlink(missing_ok=True)
        script = Path(__file__).with_name("engine_run.py")
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        worker = os.environ.get("PYTEST_XDIST_WORKER")
        if worker is not None:
            environment["VLLM_CPU_OMP_THREADS_BIND"] = str(int(worker.removeprefix("gw")) % (os.cpu_count() or 1))
        with (OUTPUT / f"{name}.log").open("w") as log:
            subprocess.run(
                [str(VLLM_PYTHON), str(script), str(asked), str(answered)],
                stdout=log, stderr=log, check=True, cwd=OUTPUT, env=environment,
            )  # fmt: skip
        result: dict[str, Any] = json.loads(answered.read_text())
        assert result["engine_version"] == VERSION
        return result

    def serve(self, name: str, decoded: Decoded, target: str, speculative: Any) -> tuple[dict[str, Any], list[Any]]:
        """The same prompts with vLLM, in the same dtype: the record of both sides, and what vLLM answers."""
        engine = self.vllm(name, self.request(decoded, target, speculative))
        return self.record(name, decoded.summary, engine), engine["tokens"]

    def request(self, decoded: Decoded, target: str, speculative: Any) -> dict[str, Any]:
        summary = decoded.summary
        return {
            "target": target, "speculative": speculative, "prompts": decoded.prompts,
            "max_tokens": summary["max_tokens"], "dtype": summary["dtype"],
        }  # fmt: skip

    def plain(self, decoded: Decoded, target: str) -> list[Any]:
        """What vLLM answers without a drafter: asked once for all drafters of the same prompts."""
        request = self.request(decoded, target, None)
        name = f"plain-{hashlib.sha256(json.dumps(request).encode()).hexdigest()[:8]}"
        result = OUTPUT / f"{name}.result.json"
        with FileLock(OUTPUT / f".{name}.lock"):
            found = json.loads(result.read_text()) if result.exists() else self.vllm(name, request)
        return list(found["tokens"])

    def record(self, name: str, ours: dict[str, Any], engine: dict[str, Any]) -> dict[str, Any]:
        """Add one drafter to summary.json. Engines count the rounds that had drafts."""
        rounds, drafting = engine["num_rounds"], ours["num_rounds"] / ours["rounds_drafting"]
        row = {
            "ours": ours["acceptance_length_when_drafting"],
            "engine": 1 + engine["num_accepted"] / rounds,
            "joint_rates_ours": [rate * drafting for rate in ours["joint_rates"]],
            "joint_rates_engine": [count / rounds for count in engine["accepted_per_position"]],
            "num_draft_tokens": ours["num_draft_tokens"],
            "prompts": ours["prompts"],
            "dtype": ours["dtype"],
            "engine_version": engine["engine_version"],
        }
        (OUTPUT / "rows" / f"{name}.json").write_text(json.dumps(row))
        rows = {path.stem: json.loads(path.read_text()) for path in sorted((OUTPUT / "rows").glob("*.json"))}
        (OUTPUT / "summary.json").write_text(json.dumps(rows, indent=2) + "\n")
        print(f"\n{name}: {json.dumps(row)}")
        return row


@pytest.fixture(scope="session")
def served() -> Served:
    return Served()


@pytest.fixture(scope="session")
def smollm2_folder() -> str:
    from data.wheel_target import smollm2_folder

    return str(smollm2_folder())


@pytest.fixture(scope="session")
def checkpoint(served: Served) -> str:
    """The head of `make demo` or `make compare` if one of them has run here, else one of a third of an epoch."""
    for run in (ROOT / "outputs" / "train" / "eagle3-smollm2", ROOT / "outputs" / "compare" / "eagle3"):
        if (run / "summary.json").exists():
            return str(run)
    short = OUTPUT / "head"
    served.command("train", "+target=smollm2", "drafter=eagle3", "epochs=0.35", "tracker=none", f"output_dir={short}")
    return str(short)
