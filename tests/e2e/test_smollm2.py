"""Real weights: SmolLM2-135M-Instruct with a fresh head (attention and feed-forward copied, nothing trained)."""

from collections.abc import Iterator

import pytest
import torch
from transformers import DynamicCache

from conf.cli import build, check_overrides
from data.corpus import CorpusConfig
from data.prepare import make_encoder, prepare
from data.target import Target
from eval.generate import speculative_generate
from eval.suites import Prompt, read_prompts
from tests.eval.decoding import decoding
from train.drafters.base import Drafter, chain
from train.job import build_drafter

NEAR_TIE = 1e-4
"""Top-2 logit gap below which float32 rounding may decide."""


@pytest.fixture(scope="module")
def smollm2() -> Iterator[tuple[Target, Drafter, list[Prompt]]]:
    job = build(check_overrides("train", ["+target=smollm2", "tracker=none"]))
    target = Target(job.target, torch.float32)
    corpus = prepare(target, job.corpus, job.data.max_tokens, job.validation_conversations, job.seed)
    drafter = build_drafter(job, target, corpus).eval()
    heldout = CorpusConfig(name="heldout", path="sample:heldout40.jsonl", max_conversations=None)
    yield target, drafter, read_prompts(heldout, make_encoder(target, 8192))


def reference(target: Target, prompt: list[int], max_tokens: int) -> list[int]:
    """transformers' own greedy answer."""
    output = target.model.generate(
        input_ids=torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=max_tokens, do_sample=False, cache=DynamicCache(config=target.hf_config), pad_token_id=0,
    )  # fmt: skip
    return output[0, len(prompt) :].tolist()


def gap_at(target: Target, text: list[int]) -> float:
    """Difference of the two largest logits after `text`."""
    last = target.model(input_ids=torch.tensor([text])).logits[0, -1].topk(2).values
    return float(last[0] - last[1])


@torch.no_grad()
def check_prompts(target: Target, drafter: Drafter, prompts: list[Prompt], max_tokens: int) -> int:
    """Compare with transformers; every divergence must start at a near-tie. Returns the number of divergences."""
    divergences = 0
    for prompt in prompts:
        ids = prompt.input_ids
        ours = speculative_generate(target, drafter, [ids], decoding(chain(3), max_tokens)).answers[0].tokens
        theirs = reference(target, ids, max_tokens)
        if ours == theirs:
            continue
        divergences += 1
        first = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
        gap = gap_at(target, ids + ours[:first])
        print(f"{prompt.source}: diverges at token {first}, top-2 gap {gap:.2e}")
        assert gap < NEAR_TIE
    print(f"{divergences} of {len(prompts)} answers diverge, all at near-ties")
    return divergences


def test_greedy_speculative_output_is_transformers_output(smollm2: tuple[Target, Drafter, list[Prompt]]) -> None:
    target, drafter, prompts = smollm2
    check_prompts(target, drafter, prompts[:3], 32)


@pytest.mark.slow
def test_greedy_speculative_output_is_transformers_output_on_40_prompts(
    smollm2: tuple[Target, Drafter, list[Prompt]],
) -> None:
    target, drafter, prompts = smollm2
    assert len(prompts) == 40
    check_prompts(target, drafter, prompts, 128)
