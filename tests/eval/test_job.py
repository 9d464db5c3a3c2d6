"""What is evaluated: a checkpoint, or a proposer that needs no training."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conf import InputError
from conf.cli import build, check_overrides
from eval.job import load_proposer, run


@pytest.fixture
def argv(tiny_folder: Callable[..., Path], tmp_path: Path) -> list[str]:
    prompts = [{"messages": [{"role": "user", "content": text}]} for text in ("ab ab ab ab", "c", "ab ab xy ab")]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return [
        "+target=qwen3", "target.name=tiny", f"target.path={tiny_folder('llama')}", "target.chat_template_kwargs={}",
        "corpus=jsonl", f"corpus.path={tmp_path / 'prompts.jsonl'}", "max_tokens=12", "batch_size=2",
    ]  # fmt: skip


@pytest.mark.parametrize("overrides", [[], ["drafter=ngram"], ["+target=smollm2"]])
def test_nothing_to_evaluate_is_an_input_error(overrides: list[str]) -> None:
    with pytest.raises(InputError, match=r"checkpoint=RUN"):
        load_proposer(build(check_overrides("eval", [f"+{o}" if o[0] == "d" else o for o in overrides])))


def test_untrained_head_is_refused(argv: list[str]) -> None:
    with pytest.raises(InputError, match=r"eagle3 must be trained first"):
        load_proposer(build(check_overrides("eval", [*argv, "+drafter=eagle3"])))


@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
def test_model_free_drafter_is_measured_on_every_target_forward(
    argv: list[str], drafter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(check_overrides("eval", [*argv, f"+drafter={drafter}", "plain_prompts=1", "trace=true"]))
    folder = tmp_path / "outputs" / "eval" / f"{drafter}-tiny"
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    lines = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]
    assert summary["num_rounds"] == len(lines)
    accepted = [line["num_accepted"] for line in lines]
    assert summary["acceptance_length_decoded"] == pytest.approx(1 + sum(accepted) / len(lines))
    drafting = [line for line in lines if line["drafts"]]
    assert summary["rounds_drafting"] == len(drafting)
    when = 1 + sum(line["num_accepted"] for line in drafting) / max(1, len(drafting))
    assert summary["acceptance_length_when_drafting"] == pytest.approx(when)
    assert sum(line["num_emitted"] for line in lines) == summary["generated_tokens"] - summary["prompts"]
    assert summary["outputs_equal_to_plain"] == 1 and sum(summary["time_share"].values()) == pytest.approx(1)
