"""Sampled speculative decoding has the target's law: chi-square tests against exact enumeration, with controls.

The logits of a real tiny target and a real tiny EAGLE-3 head are tabulated for every context that three tokens can
meet. The real decoder, verification and sampling then run on table look-ups, fast enough for 60,000 samples. A smaller
run uses the real objects. The negative controls are broken decoders that the same test must reject at the same size.
"""

import bisect
import copy
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from data.batch import TargetFeatures, Wants
from eval import generate, verify
from eval.generate import speculative_generate
from eval.sampling import SamplingConfig
from train.drafters.base import Draft

VOCAB, DRAFT_VOCAB, K, LENGTH = 6, 5, 3, 3
PROMPT = [1, 4, 2]
SAMPLES = 60_000
ALPHA = 1e-6
UNLIKELY = 0.3
"""The anticipating control leaves drafts below this probability out."""
PLAIN = SamplingConfig(temperature=1.0, top_k=None, top_p=1.0)
WARPED = SamplingConfig(temperature=0.7, top_k=None, top_p=0.9)
Context = tuple[int, ...]


@dataclass(frozen=True)
class Tables:
    """Logits of the real models."""

    target: Any
    drafter: Any
    target_logits: dict[Context, Tensor]  # generated tokens so far -> (V,) float64
    draft_logits: dict[tuple[Context, Context], Tensor]  # (committed tokens, drafts since) -> (Vd,) float64
    draft_ids: list[int]


def contexts(longest: int) -> Iterator[Context]:
    for length in range(longest + 1):
        yield from itertools.product(range(VOCAB), repeat=length)


@torch.no_grad()
def tabulate_target(target: Any) -> dict[Context, Tensor]:
    """Uncached forward passes of the transformers model itself."""
    table: dict[Context, Tensor] = {}
    tails = torch.cartesian_prod(*[torch.arange(VOCAB)] * (LENGTH - 1 + K))
    for group in tails.split(2048):
        ids = torch.cat([torch.tensor(PROMPT).expand(len(group), -1), group], dim=1)
        logits = target.model(input_ids=ids, use_cache=False).logits[:, len(PROMPT) - 1 :]
        for tail, rows in zip(group.tolist(), logits, strict=True):
            for length, row in enumerate(rows):
                table.setdefault(tuple(tail[:length]), row)
    return table


@torch.inference_mode()
def tabulate_drafter(target: Any, drafter: Any) -> dict[tuple[Context, Context], Tensor]:
    """The real `propose`, forced down every chain by a warp that notes the logits and leaves one choice."""
    table: dict[tuple[Context, Context], Tensor] = {}
    draft_ids = drafter.draft_to_target_ids.tolist()
    for committed in list(contexts(LENGTH - 1))[1:]:  # at least the first token is committed
        ids = torch.tensor([[*PROMPT, *committed]])
        _, features = target.step(ids[:, :-1], target.new_cache(), drafter.wants)
        fresh = drafter.start(ids.shape[1] + K)
        drafter.observe(fresh, features, ids[:, 1:])
        for chain in itertools.product(range(DRAFT_VOCAB), repeat=K - 1):
            forced = [*chain, 0]
            seen: list[Tensor] = []

            def warp(logits: Tensor, seen: list[Tensor] = seen, forced: list[int] = forced) -> Tensor:
                seen.append(logits[0])
                return torch.nn.functional.one_hot(torch.tensor([forced[len(seen) - 1]]), DRAFT_VOCAB).double()

            drafter.propose(copy.deepcopy(fresh), K, warp, None)
            drafts = tuple(draft_ids[index] for index in chain)
            for depth, logits in enumerate(seen):
                table[committed, drafts[:depth]] = logits
    return table


@pytest.fixture(scope="module")
def tables(tiny_target: Callable[..., Any], tiny_drafter: Callable[..., Any]) -> Tables:
    target = tiny_target("llama", torch.float64, vocab_size=VOCAB, num_hidden_layers=3)  # its end token is 257: never
    drafter = tiny_drafter(target, DRAFT_VOCAB, aux_layers=(1, 2))
    draft_ids = drafter.draft_to_target_ids.tolist()
    return Tables(target, drafter, tabulate_target(target), tabulate_drafter(target, drafter), draft_ids)


def reference_probs(logits: Tensor, sampling: SamplingConfig) -> list[float]:
    """Temperature and top-p in plain Python, apart from eval.sampling."""
    weights = [float(x) for x in (logits / sampling.temperature).exp()]
    probs = [weight / sum(weights) for weight in weights]
    kept, total = [0.0] * len(probs), 0.0
    for probability, token in sorted(zip(probs, itertools.count(), strict=False), reverse=True):
        if total < sampling.top_p:
            kept[token], total = probability, total + probability
    return [probability / total for probability in kept]


def exact_law(tables: Tables, sampling: SamplingConfig) -> dict[Context, float]:
    rows = {context: reference_probs(tables.target_logits[context], sampling) for context in contexts(LENGTH - 1)}
    return {
        tokens: math.prod(rows[tokens[:position]][token] for position, token in enumerate(tokens))
        for tokens in itertools.product(range(VOCAB), repeat=LENGTH)
    }


def p_and_q(tables: Tables, first: int, sampling: SamplingConfig) -> tuple[list[float], list[float]]:
    """Target and drafter for the second token, after `first`."""
    draft = dict(zip(tables.draft_ids, reference_probs(tables.draft_logits[(first,), ()], sampling), strict=True))
    return reference_probs(tables.target_logits[first,], sampling), [draft.get(token, 0.0) for token in range(VOCAB)]


@dataclass
class TableCache:
    tokens: list[int] = field(default_factory=list)

    def crop(self, count: int) -> None:
        assert -len(self.tokens) < count < 0
        del self.tokens[count:]


class TableTarget:
    """The part of `data.target.Target` that the decoder uses. Row features are the id that was read."""

    eos_token_ids: frozenset[int] = frozenset()
    device = torch.device("cpu")

    def __init__(self, tables: Tables) -> None:
        self.table = tables.target_logits

    def new_cache(self) -> TableCache:
        return TableCache()

    def step(self, ids: Tensor, cache: TableCache, wants: Wants) -> tuple[Tensor, TargetFeatures]:
        rows = []
        for token in ids[0].tolist():
            cache.tokens.append(token)
            rows.append(self.table[tuple(cache.tokens[len(PROMPT) :])])
        return torch.stack(rows)[None], TargetFeatures(aux_hidden_states=ids[..., None], last_hidden_state=None)

    def logits(self, last_hidden_state: Tensor) -> Tensor:
        return last_hidden_state


class TableDrafter:
    """`start`, `observe` and `propose` of the tabulated head; `observe` checks that features and tokens belong."""

    wants = Wants(aux_layers=(), last_hidden_state=False)

    def __init__(self, tables: Tables, seed: int, choose_argmax: bool = False) -> None:
        self.tables, self.random, self.choose_argmax = tables, random.Random(seed), choose_argmax
        self.rows: dict[tuple[Context, Context], tuple[list[float], Tensor]] = {}

    def start(self, max_tokens: int) -> list[int]:
        return PROMPT[:1]

    def observe(self, state: list[int], features: TargetFeatures, next_ids: Tensor) -> None:
        following = next_ids[0].tolist()
        read = [state[-1], *following[:-1]]  # the tokens whose rows these must be
        assert features.aux_hidden_states[0, :, 0].tolist() == read
        state += following

    def propose(self, state: list[int], num_draft_tokens: int, warp: Any, generator: Any) -> Draft:
        committed, drafts, probs = tuple(state[len(PROMPT) :]), [], []
        for _ in range(num_draft_tokens):
            cumulative, row = self._row(committed, tuple(drafts), warp)
            if self.choose_argmax or warp is None:
                drafts.append(int(row.argmax()))
            else:
                index = bisect.bisect_right(cumulative, self.random.random() * cumulative[-1])
                drafts.append(self.tables.draft_ids[min(index, DRAFT_VOCAB - 1)])
            probs.append(row)
        return Draft(tokens=torch.tensor([drafts]), probs=None if warp is None else torch.stack(probs)[None])

    def _row(self, committed: Context, drafts: Context, warp: Any) -> tuple[list[float], Tensor]:
        """Cumulative draft probabilities, and the same as a row over the target's vocabulary."""
        key = (committed, drafts)
        if key not in self.rows:
            logits = self.tables.draft_logits[key]
            probs = logits.softmax(-1) if warp is None else warp(logits[None])[0]
            row = torch.zeros(VOCAB, dtype=torch.float64)
            row[self.tables.draft_ids] = probs
            self.rows[key] = list(itertools.accumulate(probs.tolist())), row
        return self.rows[key]


def sample(target: Any, drafter: Any, sampling: SamplingConfig, count: int, k: int = K) -> tuple[Any, int]:
    """Counts of the generated tokens, and in how many runs the very first draft was kept."""
    generator = torch.Generator().manual_seed(1)
    answers = [speculative_generate(target, drafter, PROMPT, LENGTH, k, sampling, generator) for _ in range(count)]
    first_kept = sum(answer.rounds[0].num_accepted > 0 for answer in answers)
    return Counter(tuple(answer.tokens) for answer in answers), first_kept


def chi_square_p(counts: Any, law: dict[Context, float]) -> float:
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


def soft_q_for_greedy_drafts(patch: pytest.MonkeyPatch, tables: Tables) -> TableDrafter:
    return TableDrafter(tables, seed=2, choose_argmax=True)


def residual_is_p(patch: pytest.MonkeyPatch, tables: Tables) -> TableDrafter:
    patch.setattr(verify, "residual", lambda p, q: p)
    return TableDrafter(tables, seed=2)


def anticipating_truncation(patch: pytest.MonkeyPatch, tables: Tables) -> TableDrafter:
    def cut_before_unlikely(draft: Tensor, q: Tensor, p: Tensor, generator: Any) -> Any:
        chosen = q.gather(1, draft[:, None])[:, 0]
        kept = int((chosen >= UNLIKELY).long().cumprod(0).sum())  # x_k itself decides whether x_k is verified
        return verify.verify_sampled(draft[:kept], q[:kept], p[: kept + 1], generator)

    patch.setattr(generate, "verify_sampled", cut_before_unlikely)
    return TableDrafter(tables, seed=2)


def control_error(control: Any, p: list[float], q: list[float]) -> float:
    """Total variation between p and the second token of a broken decoder, by its formula."""
    keep = [min(a, b) for a, b in zip(p, q, strict=True)]
    rest = [(a - b) / (1 - sum(keep)) for a, b in zip(p, keep, strict=True)]  # the right residual
    if control is soft_q_for_greedy_drafts:
        best = q.index(max(q))
        kept = min(1.0, p[best] / q[best])
        out = [kept * (token == best) + (1 - kept) * r for token, r in enumerate(rest)]
    elif control is residual_is_p:
        out = [a + (1 - sum(keep)) * b for a, b in zip(keep, p, strict=True)]
    else:
        unverified = sum(b for b in q if b < UNLIKELY)
        rejected = sum(b - a for a, b in zip(keep, q, strict=True) if b >= UNLIKELY)
        out = [a * (b >= UNLIKELY) for a, b in zip(keep, q, strict=True)]
        out = [a + rejected * r + unverified * b for a, r, b in zip(out, rest, p, strict=True)]
    assert sum(out) == pytest.approx(1)
    return sum(abs(a - b) for a, b in zip(out, p, strict=True)) / 2


# With one draft per round the bonus token is among the first three; with three it never is.
@pytest.mark.parametrize(
    ("sampling", "num_drafts", "samples"), [(PLAIN, K, SAMPLES), (WARPED, K, SAMPLES), (PLAIN, 1, 12_000)]
)
def test_three_tokens_follow_the_targets_law_at_the_exact_acceptance(
    tables: Tables, sampling: SamplingConfig, num_drafts: int, samples: int
) -> None:
    counts, first_kept = sample(TableTarget(tables), TableDrafter(tables, 1), sampling, samples, num_drafts)
    assert chi_square_p(counts, exact_law(tables, sampling)) > ALPHA
    rate = 0.0  # of the first draft: sum of min(p, q), averaged over the first token
    for first, probability in enumerate(reference_probs(tables.target_logits[()], sampling)):
        rate += probability * sum(map(min, *p_and_q(tables, first, sampling)))
    assert stats.binomtest(first_kept, samples, rate).pvalue > ALPHA


# A smaller sample makes a control harder to reject (non-centrality grows with the size), so 4,000 is the stricter form.
@pytest.mark.parametrize("samples", [4_000, pytest.param(SAMPLES, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sampling", [PLAIN, WARPED], ids=["T=1", "T=.7 top_p=.9"])
@pytest.mark.parametrize("control", [soft_q_for_greedy_drafts, residual_is_p, anticipating_truncation])
def test_broken_decoder_is_rejected(tables: Tables, control: Any, sampling: SamplingConfig, samples: int) -> None:
    first = reference_probs(tables.target_logits[()], sampling)
    error = sum(p * control_error(control, *p_and_q(tables, token, sampling)) for token, p in enumerate(first))
    with pytest.MonkeyPatch.context() as patch:
        counts, _ = sample(TableTarget(tables), control(patch, tables), sampling, samples)
    p_value = chi_square_p(counts, exact_law(tables, sampling))
    print(f"{control.__name__}: total variation of the second token {error:.3f}, p = {p_value:.1e}")
    assert error > 0.05
    assert p_value < ALPHA


def test_the_real_target_and_head_follow_the_law_too(tables: Tables) -> None:
    counts, _ = sample(tables.target, tables.drafter, PLAIN, 3_000, k=2)
    law = exact_law(tables, PLAIN)
    for pair in (slice(0, 2), slice(1, 3)):  # the second pair spans a rollback wherever the first draft was rejected
        seen, wanted = Counter(), Counter()
        for tokens in law:
            seen[tokens[pair]] += counts[tokens]
            wanted[tokens[pair]] += law[tokens]
        assert chi_square_p(seen, dict(wanted)) > ALPHA
