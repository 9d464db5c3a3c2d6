"""`make bench-decoder`: the decoder beside transformers, on SmolLM2 in bf16. Ratios of runs that alternate.

Writes outputs/bench-decoder/summary.json:

    plain_ratio_to_transformers    tokens per second of plain decoding over transformers' generate, batch 1 and 8
    assisted_generation_ratio      transformers' prompt-lookup generation over its plain one, batch 1
    overhead_fraction              share of decoding in neither target nor drafter, batch 1
    verify_cost_ratio              time of a step of 1 + K rows over one of 1 row, cache of 128 tokens
    speedup                        speculative over plain decoding, batch 1, for each drafter and K
    block_verification             acceptance length at T = 1, block by block and token by token, with standard errors
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM

from conf.cli import build, check_overrides
from conf.records import provenance, write_json
from data.batch import Wants
from data.corpus import CorpusConfig
from data.encode import Encoder
from data.prepare import make_encoder
from data.target import Target
from eval.generate import plain_generate, speculative_generate
from eval.generation import Batched
from eval.suites import read_prompts
from tests.eval.decoding import SAMPLED, decoding
from train.checkpoint import load_drafter
from train.drafters.base import Proposer, chain
from train.drafters.ngram import NgramConfig

OUTPUT = Path("outputs/bench-decoder/summary.json")
RUN = "outputs/train/eagle3-smollm2"
COPIES = Path(__file__).with_name("copies.jsonl")
REPEATS, TOKENS, SAMPLES, DRAFTS = 3, 64, 6, (1, 2, 3, 5, 7)


def read_ids(encoder: Encoder, path: str) -> list[list[int]]:
    """The first prompts of a file."""
    corpus = CorpusConfig(name="bench", path=path, max_conversations=8)
    return [prompt.input_ids for prompt in read_prompts(corpus, encoder)]


def rate(found: Batched) -> float:
    """Tokens per second after the prompt."""
    return sum(len(answer.tokens) - 1 for answer in found.answers) / found.clock.total


def theirs(model: Any, prompts: list[list[int]], **options: Any) -> float:
    """Tokens per second of transformers' generate after the prompt: the time of one token is taken off."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    seconds = []
    for tokens in (1, TOKENS):
        started = time.perf_counter()
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0,
            **options,
        )  # fmt: skip
        seconds.append(time.perf_counter() - started)
    return len(prompts) * (out.shape[1] - width - 1) / (seconds[1] - seconds[0])


def alternating(first: Callable[[], float], second: Callable[[], float]) -> dict[str, float]:
    """Ratio of the medians of two rates, measured A B A B, and the extremes of the pairs' ratios."""
    pairs = [(first(), second()) for _ in range(REPEATS)]
    ratios = [a / b for a, b in pairs]
    a, b = (statistics.median(side) for side in zip(*pairs, strict=True))
    return {"ratio": a / b, "lowest": min(ratios), "highest": max(ratios)}


def plain_ratios(target: Target, reference: Any, prompts: list[list[int]]) -> dict[str, dict[str, float]]:
    """Plain decoding beside transformers', by batch size. On both sides no answer ends early: all steps are full."""
    plain = decoding(chain(1), TOKENS)
    with mock.patch.object(Target, "eos_token_ids", frozenset()):
        return {
            str(batch): alternating(
                lambda group=prompts[:batch]: rate(plain_generate(target, group, plain)),
                lambda group=prompts[:batch]: theirs(reference, group),
            )
            for batch in (1, 8)
        }


def verify_cost(target: Target) -> dict[str, float]:
    """Time of a verification step over that of a plain one."""
    wants = Wants(aux_layers=(), last_hidden_state=False)
    cache = target.new_cache(1, 160)
    target.step(torch.randint(0, 1000, (1, 128)), cache, wants)
    cache.commit(torch.tensor([128]))

    def seconds(rows: int) -> float:
        ids = torch.randint(0, 1000, (1, rows))
        times = []
        for _ in range(15):
            started = time.perf_counter()
            last, _ = target.step(ids, cache, wants)
            target.logits(last)
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    seconds(1)
    return {str(k): seconds(1 + k) / statistics.mean((seconds(1), seconds(1))) for k in range(1, 9)}


def speedups(
    target: Target, proposer: Proposer, prompts: list[list[int]], drafts: Sequence[int] = DRAFTS
) -> dict[str, dict[str, float]]:
    """Speculative over plain decoding at batch 1, for each K; side by side, so that the machine's mood cancels.
    `draft_cost` is the drafter's time per drafted token over that of a plain step."""
    plain, drafted = (dict.fromkeys(drafts, 0.0) for _ in range(2))
    overhead: dict[int, list[float]] = {k: [] for k in drafts}
    cost: dict[int, list[float]] = {k: [] for k in drafts}
    accepted: dict[int, list[int]] = {k: [] for k in drafts}
    for prompt in prompts:
        for k in drafts:
            step = 1 / rate(plain_generate(target, [prompt], decoding(chain(1), TOKENS)))
            plain[k] += step
            found = speculative_generate(target, proposer, [prompt], decoding(chain(k), TOKENS))
            drafted[k] += 1 / rate(found)
            overhead[k].append(1 - (found.clock.target + found.clock.drafter) / found.clock.total)
            rounds = found.answers[0].rounds
            cost[k].append(found.clock.drafter / max(1, k * len(rounds)) / step)
            accepted[k] += [turn.num_accepted for turn in rounds]
    return {
        str(k): {
            "speedup": plain[k] / drafted[k],
            "acceptance_length": 1 + statistics.fmean(accepted[k]),
            "overhead_fraction": statistics.median(overhead[k]),
            "draft_cost": statistics.median(cost[k]),
        }
        for k in drafts
    }


def block_verification(target: Target, proposer: Proposer, prompts: list[list[int]]) -> dict[str, dict[str, float]]:
    """Acceptance length when sampling at T = 1, K = 3, by rule."""
    found = {}
    for rule in ("token", "block"):
        accepted: list[int] = []
        for seed in range(SAMPLES):
            generator = torch.Generator().manual_seed(seed)
            plan = decoding(chain(3), TOKENS, SAMPLED, rule=rule)
            answers = speculative_generate(target, proposer, prompts, plan, generator).answers
            accepted += [turn.num_accepted for answer in answers for turn in answer.rounds]
        found[rule] = {
            "acceptance_length": 1 + statistics.fmean(accepted),
            "standard_error": statistics.stdev(accepted) / len(accepted) ** 0.5,
        }
    return found


def main() -> None:
    """Measure everything; the head is the demo's."""
    if not Path(RUN, "summary.json").exists():
        sys.exit(f"{RUN} is missing: run `make demo` first")
    loaded = load_drafter(RUN, None, torch.bfloat16, trust_remote_code=False)
    target = loaded.target
    reference = AutoModelForCausalLM.from_pretrained(target.folder, dtype=torch.bfloat16, attn_implementation="sdpa")
    encoder = make_encoder(target, 8192)
    prompts, copies = (read_ids(encoder, path) for path in ("sample:heldout40.jsonl", str(COPIES)))
    job = build(check_overrides("eval", ["+target=smollm2", "+drafter=ngram"]))
    assert isinstance(job.drafter, NgramConfig)
    ngram = job.drafter.build(target.parts, torch.arange(0))
    summary: dict[str, Any] = {"plain_ratio_to_transformers": plain_ratios(target, reference, prompts)}
    print(summary, flush=True)
    summary["assisted_generation_ratio"] = alternating(
        lambda: theirs(reference, prompts[:1], prompt_lookup_num_tokens=3), lambda: theirs(reference, prompts[:1])
    )
    summary["verify_cost_ratio"] = verify_cost(target)
    summary["speedup"] = {}
    for name, proposer, group in (
        ("eagle3", loaded.drafter, prompts), ("ngram", ngram, prompts), ("ngram on copies", ngram, copies)
    ):  # fmt: skip
        summary["speedup"][name] = speedups(target, proposer, group)
        print(name, summary["speedup"][name], flush=True)
    summary["block_verification"] = block_verification(target, loaded.drafter, prompts)
    head = summary["speedup"]["eagle3"]
    summary["overhead_fraction"] = max(entry["overhead_fraction"] for entry in head.values())
    summary["provenance"] = provenance()
    write_json(OUTPUT, summary)
    print(json.dumps({key: value for key, value in summary.items() if key != "provenance"}, indent=2))


if __name__ == "__main__":
    main()
