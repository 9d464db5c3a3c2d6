"""What the serving tests share: our commands, real vLLM in its own environment, and one summary.json of both."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
OUTPUT = ROOT / "outputs" / "test-serving"
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"


class Served:
    """Both sides of a comparison, and the record of it."""

    def __init__(self) -> None:
        self.output = OUTPUT
        self.summary: dict[str, Any] = {}
        OUTPUT.mkdir(parents=True, exist_ok=True)

    def command(self, *arguments: str) -> None:
        """Run one of our commands from the checkout."""
        subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, check=True)

    def vllm(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        """Serve with real vLLM; its log stays beside the result."""
        if not VLLM_PYTHON.exists():
            pytest.skip("no vLLM environment: run `make test-serving`")
        asked, answered = OUTPUT / f"{name}.request.json", OUTPUT / f"{name}.result.json"
        asked.write_text(json.dumps(request))
        answered.unlink(missing_ok=True)
        script = Path(__file__).with_name("engine_run.py")
        with (OUTPUT / f"{name}.log").open("w") as log:
            subprocess.run(
                [str(VLLM_PYTHON), str(script), str(asked), str(answered)],
                stdout=log, stderr=log, check=True, cwd=OUTPUT, env={**os.environ, "HF_HUB_OFFLINE": "1"},
            )  # fmt: skip
        result: dict[str, Any] = json.loads(answered.read_text())
        return result

    def record(self, name: str, ours: dict[str, Any], engine: dict[str, Any]) -> dict[str, Any]:
        """Add one head to summary.json."""
        rounds = engine["num_rounds"]
        row = {
            "ours": ours["acceptance_length_decoded"],
            "engine": 1 + engine["num_accepted"] / rounds,
            "joint_rates_ours": ours["joint_rates"],
            "joint_rates_engine": [count / rounds for count in engine["accepted_per_position"]],
            "num_draft_tokens": ours["num_draft_tokens"],
            "prompts": ours["prompts"],
            "engine_version": engine["engine_version"],
        }
        self.summary[name] = row
        (OUTPUT / "summary.json").write_text(json.dumps(self.summary, indent=2) + "\n")
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
    """The demo's head if `make demo` has run here, else one trained on a third of an epoch."""
    demo = ROOT / "outputs" / "train" / "eagle3-smollm2"
    if (demo / "summary.json").exists():
        return str(demo)
    short = OUTPUT / "head"
    served.command("train", "+target=smollm2", "drafter=eagle3", "epochs=0.35", "tracker=none", f"output_dir={short}")
    return str(short)
