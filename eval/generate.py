"""The embedded decoder: plain decoding, and lossless speculative decoding with chain drafts. Batch size 1.

A round: the drafter proposes K tokens after the committed text; the target reads the last committed token and the K
drafts in one cached forward pass; verification keeps some of them and adds one of the target's own; both caches forget
what was not kept; the drafter then takes in the target's true features of the kept rows.

Counting: a round's `num_accepted` are the drafts kept *and emitted*. Drafts beyond the end of the output (end-of-turn
token or token limit) are not counted, and the round that ends there still counts as a round. `train.acceptance` counts
the same way.
"""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from data.batch import Wants
from data.target import Target
from eval.sampling import SamplingConfig
from eval.verify import Verdict, verify_greedy, verify_sampled
from train.drafters.base import Draft, Drafter


@dataclass(frozen=True)
class Round:
    """One draft-verify-commit round."""

    num_accepted: int
    """Drafted tokens kept and emitted, 0..K."""
    num_emitted: int
    """Tokens added to the output: num_accepted, and the target's own unless the output ended before it."""
    target_gap: float
    """Smallest difference between the two largest target logits over the rows that decided this round: where it is
    tiny, rounding may decide otherwise."""


@dataclass(frozen=True)
class Generation:
    """One answer."""

    tokens: list[int]
    """Generated ids, end-of-turn token included."""
    rounds: list[Round]
    """Empty for plain decoding."""
    prefill_seconds: float
    decode_seconds: float
    """Everything after the prompt's forward pass."""


def plain_generate(
    target: Target, prompt: list[int], max_tokens: int, sampling: SamplingConfig, generator: torch.Generator | None
) -> Generation:
    """Autoregressive decoding with the same target code: the baseline of every speed-up.

    Args:
        target: the model.
        prompt: token ids, generation prompt included.
        max_tokens: most tokens to generate.
        sampling: temperature, top-k, top-p.
        generator: source of randomness, unused at temperature 0.
    """
    wants = Wants(aux_layers=(), last_hidden_state=False)
    started = time.perf_counter()
    cache = target.new_cache()
    last, _ = target.step(_ids(target, prompt), cache, wants)
    tokens = [_choose(target.logits(last[0, -1:])[0], sampling, generator)]
    prefilled = time.perf_counter()
    while len(tokens) < max_tokens and tokens[-1] not in target.eos_token_ids:
        last, _ = target.step(_ids(target, tokens[-1:]), cache, wants)
        tokens.append(_choose(target.logits(last[0])[0], sampling, generator))
    return Generation(tokens, [], prefilled - started, time.perf_counter() - prefilled)


@torch.inference_mode()
def speculative_generate(
    target: Target,
    drafter: Drafter,
    prompt: list[int],
    max_tokens: int,
    num_draft_tokens: int,
    sampling: SamplingConfig,
    generator: torch.Generator | None = None,
) -> Generation:
    """Speculative decoding: the law of the output is that of `plain_generate`, token for token at temperature 0.

    Args:
        target: the model.
        drafter: in the target's dtype and on its device.
        prompt: token ids, generation prompt included.
        max_tokens: most tokens to generate.
        num_draft_tokens: K per round.
        sampling: applied to the target's and the drafter's logits alike.
        generator: source of randomness, unused at temperature 0.
    """
    warp = None if sampling.greedy else sampling.probs
    started = time.perf_counter()
    cache = target.new_cache()
    state = drafter.start(len(prompt) + max_tokens + num_draft_tokens)
    last, features = target.step(_ids(target, prompt), cache, drafter.wants)
    tokens = [_choose(target.logits(last[0, -1:])[0], sampling, generator)]
    drafter.observe(state, features, _ids(target, [*prompt[1:], tokens[0]]))
    prefilled = time.perf_counter()
    rounds: list[Round] = []
    while len(tokens) < max_tokens and tokens[-1] not in target.eos_token_ids:
        draft = drafter.propose(state, num_draft_tokens, warp, generator)
        read = torch.cat([_ids(target, tokens[-1:]), draft.tokens], dim=1)  # (1, K + 1)
        last, features = target.step(read, cache, drafter.wants)
        logits = target.logits(last[0])  # (K + 1, V)
        verdict = _verify(draft, logits, sampling, generator)
        if verdict.num_accepted < num_draft_tokens:
            cache.crop(verdict.num_accepted - num_draft_tokens)  # forgets the rejected drafts
        committed = [*draft.tokens[0, : verdict.num_accepted].tolist(), verdict.next_token]
        drafter.observe(state, features.rows(0, len(committed)), _ids(target, committed))
        emitted = _until_end(committed, max_tokens - len(tokens), target.eos_token_ids)
        tokens += emitted
        accepted = min(verdict.num_accepted, len(emitted))
        rounds.append(Round(accepted, len(emitted), _smallest_gap(logits[: verdict.num_accepted + 1])))
    return Generation(tokens, rounds, prefilled - started, time.perf_counter() - prefilled)


def _verify(draft: Draft, logits: Tensor, sampling: SamplingConfig, generator: torch.Generator | None) -> Verdict:
    if sampling.greedy:
        return verify_greedy(draft.tokens[0], logits)
    draft_probs = None if draft.probs is None else draft.probs[0]
    return verify_sampled(draft.tokens[0], draft_probs, sampling.probs(logits), generator)


def _choose(logits: Tensor, sampling: SamplingConfig, generator: torch.Generator | None) -> int:
    """One token from (V,) logits."""
    if sampling.greedy:
        return int(logits.argmax())
    return int(torch.multinomial(sampling.probs(logits), 1, generator=generator))


def _until_end(committed: list[int], room: int, eos_token_ids: frozenset[int]) -> list[int]:
    """The part of `committed` that is output: up to an end-of-turn token, at most `room` tokens."""
    for position, token in enumerate(committed[:room]):
        if token in eos_token_ids:
            return committed[: position + 1]
    return committed[:room]


def _smallest_gap(logits: Tensor) -> float:
    top = logits.topk(2, dim=-1).values
    return float((top[:, 0] - top[:, 1]).min())


def _ids(target: Target, tokens: list[int]) -> Tensor:
    return torch.tensor([tokens], device=target.device)
