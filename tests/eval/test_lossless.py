"""Sampled speculative decoding has the target's law: chi-square tests of the whole decoder, with negative controls.

A real tiny target and a real tiny head decode hundreds of prompts of four different lengths at once, in batches whose
rows accept and end at their own pace. The joint law of the first three tokens of each prompt is compared with the exact
one, from uncached forward passes. The controls are broken decoders that the same test must reject.
"""

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from eval import generate, verify
from eval.generate import speculative_generate
from eval.sampling import SamplingConfig
from tests.eval.decoding import SAMPLED, WARPED, decoding, dynamic_tree, static_tree
from train.drafters.base import Draft, DraftPlan, Proposer, chain
from train.drafters.ngram import NgramConfig
from train.drafters.suffix import SuffixConfig

VOCAB, DRAFT_VOCAB, LENGTH = 6, 5, 3
PROMPTS = [[1, 4, 2, 2, 1, 4], [3, 3], [0, 5, 1, 1, 0, 5, 2, 0, 5], [2, 2, 2, 4]]
"""They repeat themselves, so that model-free proposers have something to draft."""
ALPHA = 1e-6
BATCH = 800
UNLIKELY = 0.3
"""The anticipating control leaves drafts below this probability out."""
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class World:
    target: Any
    head: Any
    logits: list[dict[Tokens, Tensor]]
    """For each prompt: generated tokens so far -> (V,) float64 of an uncached forward pass."""


def next_token_logits(target: Any) -> list[dict[Tokens, Tensor]]:
    """For each prompt: generated tokens so far -> (V,) float64 of an uncached forward pass."""
    tails = torch.cartesian_prod(*[torch.arange(VOCAB)] * (LENGTH - 1))
    tables = []
    for prompt in PROMPTS:
        ids = torch.cat([torch.tensor(prompt).expand(len(tails), -1), tails], dim=1)
        with torch.no_grad():
            rows = target.model(input_ids=ids, use_cache=False).logits[:, len(prompt) - 1 :]
        table: dict[Tokens, Tensor] = {}
        for tail, logits in zip(tails.tolist(), rows, strict=True):
            for length in range(LENGTH):
                table.setdefault(tuple(tail[:length]), logits[length])
        tables.append(table)
    return tables


@pytest.fixture(scope="module")
def world(tiny_target: Callable[..., Any], tiny_drafter: Callable[..., Any]) -> World:
    target = tiny_target("llama", torch.float64, vocab_size=VOCAB, num_hidden_layers=3)  # its end token is 257: never
    drafter = tiny_drafter(target, DRAFT_VOCAB, aux_layers=(1, 2))
    return World(target, drafter.eval(), next_token_logits(target))


def reference_probs(logits: Tensor, sampling: SamplingConfig) -> list[float]:
    """Temperature and top-p in plain Python, apart from eval.sampling."""
    weights = [float(x) for x in (logits / sampling.temperature).exp()]
    probs = [weight / sum(weights) for weight in weights]
    kept, total = [0.0] * len(probs), 0.0
    for probability, token in sorted(zip(probs, itertools.count(), strict=False), reverse=True):
        if total < sampling.top_p:
            kept[token], total = probability, total + probability
    return [probability / total for probability in kept]


def exact_law(table: dict[Tokens, Tensor], sampling: SamplingConfig) -> dict[Tokens, float]:
    rows = {context: reference_probs(logits, sampling) for context, logits in table.items()}
    law = {}
    for tokens in itertools.product(range(VOCAB), repeat=LENGTH):
        probability = 1.0
        for position, token in enumerate(tokens):
            probability *= rows[tokens[:position]][token]
        law[tokens] = probability
    return law


def chi_square_p(counts: Counter[Tokens], law: dict[Tokens, float]) -> float:
    """p-value of a goodness-of-fit test; cells that expect fewer than 5 are pooled, impossible outcomes give 0."""
    if any(law[outcome] == 0 for outcome, count in counts.items() if count):
        return 0.0
    total = sum(counts.values())
    cells: dict[Any, list[float]] = {}
    for outcome, probability in law.items():
        cell = cells.setdefault(outcome if total * probability >= 5 else "rare", [0.0, 0.0])
        cell[:] = cell[0] + counts[outcome], cell[1] + total * probability
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells.values() if expected > 0)
    return float(stats.chi2.sf(statistic, sum(expected > 0 for _, expected in cells.values()) - 1))


def smallest_p(
    world: World, proposer: Any, plan: DraftPlan, sampling: SamplingConfig, samples: int, rule: str = "token",
    batch: int = BATCH,
) -> float:  # fmt: skip
    """The least p-value over the prompts, each decoded `samples / 4` times."""
    generator = torch.Generator().manual_seed(1)
    settings = decoding(plan, LENGTH, sampling, rule=rule)
    counts: list[Counter[Tokens]] = [Counter() for _ in PROMPTS]
    order = [index % len(PROMPTS) for index in range(samples)]
    for start in range(0, samples, batch):
        group = order[start : start + batch]
        found = speculative_generate(world.target, proposer, [PROMPTS[i] for i in group], settings, generator)
        for index, answer in zip(group, found.answers, strict=True):
            counts[index][tuple(answer.tokens)] += 1
    laws = [exact_law(table, sampling) for table in world.logits]
    return min(chi_square_p(seen, law) for seen, law in zip(counts, laws, strict=True))


def cases(world: World) -> Iterator[tuple[str, Any, DraftPlan, str]]:
    nothing: Any = None
    ngram = NgramConfig(name="ngram", draft_vocab_size=None, min_ngram=1, max_ngram=3, occurrence="latest").build(
        nothing, nothing
    )
    suffix = SuffixConfig(
        name="suffix", draft_vocab_size=None, max_tree_depth=4, max_spec_factor=3.0, min_token_prob=0.1,
        remember_outputs=True,
    ).build(nothing, nothing)  # fmt: skip
    yield "chain of 3", world.head, chain(3), "token"
    yield "chain of 1", world.head, chain(1), "token"  # the bonus token is among the first three
    yield "block of 3", world.head, chain(3), "block"
    yield "block of 2", world.head, chain(2), "block"
    yield "tree 2 2", world.head, static_tree(2, 2), "token"
    yield "tree 4", world.head, static_tree(4), "token"  # warped, fewer tokens than that have any probability
    yield "dynamic tree", world.head, dynamic_tree(3, 2, 6), "token"
    yield "n-gram", ngram, chain(3), "token"
    yield "suffix", suffix, chain(3), "token"
    yield "suffix in blocks", suffix, chain(3), "block"


CASES = ["chain of 3", "chain of 1", "block of 3", "block of 2", "tree 2 2", "tree 4", "dynamic tree", "n-gram",
         "suffix", "suffix in blocks"]  # fmt: skip


@pytest.mark.parametrize("sampling", [SAMPLED, WARPED], ids=["T=1", "T=.7 top_p=.9"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("samples", [12_000, pytest.param(240_000, marks=pytest.mark.slow)])
def test_three_tokens_follow_the_targets_law(world: World, name: str, sampling: SamplingConfig, samples: int) -> None:
    """240,000 samples are 60,000 for each prompt."""
    proposer, plan, rule = next(entry[1:] for entry in cases(world) if entry[0] == name)
    assert smallest_p(world, proposer, plan, sampling, samples, rule) > ALPHA / len(PROMPTS)


@pytest.mark.parametrize(("batch", "samples"), [(1, 400), (4, 2_000), pytest.param(4, 60_000, marks=pytest.mark.slow)])
def test_small_batches_follow_the_law_too(world: World, batch: int, samples: int) -> None:
    assert smallest_p(world, world.head, chain(3), SAMPLED, samples, batch=batch) > ALPHA / len(PROMPTS)


def test_acceptance_is_the_overlap_of_the_two_distributions(world: World) -> None:
    """Of the first draft: sum of min(p, q), averaged over what the first token may be."""
    settings = decoding(chain(1), 2, SAMPLED)
    generator = torch.Generator().manual_seed(3)
    found = speculative_generate(world.target, world.head, PROMPTS[:1] * 4_000, settings, generator).answers
    rate = 0.0
    for first, probability in enumerate(reference_probs(world.logits[0][()], SAMPLED)):
        q = first_draft(world, PROMPTS[0], first)
        p = reference_probs(world.logits[0][first,], SAMPLED)
        rate += probability * sum(map(min, p, q))
    # One round each: it emits the draft (and ends) or the correction.
    kept = sum(answer.rounds[0].num_accepted for answer in found)
    assert stats.binomtest(kept, 4_000, rate).pvalue > ALPHA


@pytest.mark.parametrize("samples", [4_000, pytest.param(80_000, marks=pytest.mark.slow)])
def test_block_verification_keeps_more_than_token_verification(world: World, samples: int) -> None:
    """99.9 % interval of the difference in tokens per round, whole answers, T = 1."""
    means, variances = [], []
    for rule in ("block", "token"):
        generator = torch.Generator().manual_seed(5)
        settings = decoding(chain(3), 13, SAMPLED, rule=rule)
        lengths = []
        for _ in range(samples // BATCH):
            found = speculative_generate(
                world.target, world.head, PROMPTS * (BATCH // len(PROMPTS)), settings, generator
            )
            lengths += [(len(answer.tokens) - 1) / len(answer.rounds) for answer in found.answers]
        means.append(statistics.fmean(lengths))
        variances.append(statistics.variance(lengths) / samples)
    gain, margin = means[0] - means[1], stats.norm.ppf(0.9995) * sum(variances) ** 0.5
    print(f"block - token: {gain:.4f} +- {margin:.4f} tokens per round")
    assert gain > margin


@torch.inference_mode()
def first_draft(world: World, prompt: list[int], first: int) -> list[float]:
    """q of the first draft after `prompt` and one token."""
    ids = torch.tensor([[*prompt, first]])
    wants = world.head.wants
    _, features = world.target.step(ids[:, :-1], world.target.new_cache(1, 20), wants)
    state = world.head.start(ids.tolist(), 20)
    world.head.observe(state, features, ids[:, 1:], torch.tensor([len(prompt)]))
    draft = world.head.propose(state, chain(1), SAMPLED.probs, torch.Generator())
    return list(draft.probs[0, 0].tolist())


# --- negative controls -----------------------------------------------------------------------------------------------


class Wrapped(Proposer):
    """A proposer that tampers with what the head proposes."""

    def __init__(self, head: Any) -> None:
        self.head, self.wants = head, head.wants

    def start(self, prompts: Any, max_tokens: int) -> Any:
        return self.head.start(prompts, max_tokens)

    def observe(self, *arguments: Any) -> None:
        self.head.observe(*arguments)


class SoftGreedy(Wrapped):
    """Drafts the argmax but states the soft distribution."""

    def propose(self, state: Any, plan: DraftPlan, warp: Any, generator: Any) -> Draft:
        seen: list[Tensor] = []

        def best(logits: Tensor) -> Tensor:
            seen.append(warp(logits))
            return torch.nn.functional.one_hot(seen[-1].argmax(-1), DRAFT_VOCAB).double()

        draft = self.head.propose(state, plan, best, generator)
        return replace(draft, probs=torch.stack([self.head._in_target_vocabulary(q) for q in seen], dim=1))


class Anticipating(Wrapped):
    """Whether a draft is verified depends on its own value."""

    def propose(self, state: Any, plan: DraftPlan, warp: Any, generator: Any) -> Draft:
        draft = self.head.propose(state, plan, warp, generator)
        chosen = draft.probs.gather(2, draft.tokens[..., None]).squeeze(2)
        return replace(draft, num_drafts=(chosen >= UNLIKELY).long().cumprod(1).sum(1))


class FirstFailure(verify.Dice):
    """Block verification that stops at the first prefix that does not pass."""

    def accept(self, probability: Tensor) -> Tensor:
        return super().accept(probability).long().cumprod(-1).bool()


def control(name: str, world: World, patch: pytest.MonkeyPatch) -> tuple[Any, DraftPlan, str]:
    if name == "wrong residual":
        patch.setattr(verify, "residual", lambda p, q: p)
        return world.head, chain(3), "token"
    if name == "soft q for greedy drafts":
        return SoftGreedy(world.head), chain(3), "token"
    if name == "no renormalisation":
        patch.setattr(verify, "_renormalised", lambda weights: weights)
        return world.head, static_tree(3), "token"
    if name == "stop at first failure":
        patch.setattr(generate, "Dice", FirstFailure)
        return world.head, chain(3), "block"
    assert name == "anticipating truncation"
    return Anticipating(world.head), chain(3), "token"


CONTROLS = ["wrong residual", "soft q for greedy drafts", "no renormalisation", "stop at first failure",
            "anticipating truncation"]  # fmt: skip


# A smaller sample makes a control harder to reject (non-centrality grows with the size): this is the stricter form.
@pytest.mark.parametrize("samples", [24_000, pytest.param(240_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CONTROLS)
def test_broken_decoder_is_rejected(world: World, name: str, samples: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        proposer, plan, rule = control(name, world, patch)
        p_value = smallest_p(world, proposer, plan, SAMPLED, samples, rule)
    print(f"{name}: p = {p_value:.1e}")
    assert p_value < ALPHA
