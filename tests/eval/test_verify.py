"""Verification rules: greedy by hand, and the exact law of rejection sampling by enumerating `verify_sampled` itself.

The enumeration drives the real function down every path: for each draft sequence it chooses uniforms just below and
just above p(x) / q(x), and reads the distribution that the function draws its own token from. Weights are Fractions.
"""

import itertools
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch

from eval import verify
from eval.verify import Verdict, residual, verify_greedy, verify_sampled

SENTINEL = -7
Rows = list[list[Fraction]]
Model = Callable[[tuple[int, ...]], list[Fraction]]
"""Tokens so far -> distribution of the next one."""


def one_hot_logits(choices: list[int], vocab: int = 6) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(choices), vocab).double()


def tensor(rows: Rows) -> torch.Tensor:
    return torch.tensor([[float(x) for x in row] for row in rows], dtype=torch.float64)


def fractions(*numerators: int) -> list[Fraction]:
    total = sum(numerators)
    return [Fraction(n, total) for n in numerators]


class Controlled:
    """Runs `verify_sampled` with given uniforms, and records the distribution that it draws its own token from."""

    def __init__(self) -> None:
        self.uniforms: list[float] = []
        self.drawn_from: list[torch.Tensor] = []

    def _rand(self, count: int, generator: Any = None, dtype: Any = None, device: Any = None) -> torch.Tensor:
        assert len(self.uniforms) == count
        return torch.tensor(self.uniforms, dtype=dtype)

    def _multinomial(self, probs: torch.Tensor, count: int, generator: Any = None) -> torch.Tensor:
        assert count == 1
        self.drawn_from.append(probs)
        return torch.tensor([SENTINEL])

    def run(
        self, draft: tuple[int, ...], q: torch.Tensor | None, p: torch.Tensor, uniforms: list[float]
    ) -> tuple[int, list[float]]:
        """num_accepted and the distribution of the next token."""
        self.uniforms, self.drawn_from = uniforms, []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "rand", self._rand)
            patch.setattr(torch, "multinomial", self._multinomial)
            verdict = verify_sampled(torch.tensor(draft, dtype=torch.int64), q, p, None)
        assert verdict.next_token == SENTINEL
        assert len(self.drawn_from) == 1
        return verdict.num_accepted, self.drawn_from[0].tolist()


@pytest.fixture
def controlled() -> Controlled:
    return Controlled()


def paths(draft: tuple[int, ...], p: Rows, q: Rows) -> Iterator[tuple[Fraction, int, list[float]]]:
    """(probability, number accepted, uniforms that lead there) of every outcome of a round, from p and q alone."""
    reached = Fraction(1)
    accepting: list[float] = []
    for k, token in enumerate(draft):
        ratio = min(Fraction(1), p[k][token] / q[k][token])
        if ratio < 1:
            rest = [0.0] * (len(draft) - k - 1)  # uniforms after a rejection must not matter
            yield reached * (1 - ratio), k, [*accepting, float(ratio) * (1 + 1e-9) + 1e-300, *rest]
        if ratio == 0:
            return
        accepting.append(float(ratio) * (1 - 1e-9))
        reached *= ratio
    yield reached, len(draft), accepting


def law(controlled: Controlled, target: Model, drafter: Model, depth: int, deterministic: bool) -> dict[Any, float]:
    """Joint law of the first K + 1 tokens when a round of K drafts is followed by the target's own tokens."""
    vocab = len(target(()))
    found: dict[tuple[int, ...], float] = dict.fromkeys(itertools.product(range(vocab), repeat=depth + 1), 0.0)
    for draft in itertools.product(range(vocab), repeat=depth):
        q = [drafter(draft[:k]) for k in range(depth)]
        drafted = Fraction(1)
        for k, token in enumerate(draft):
            drafted *= q[k][token]
        if drafted == 0:
            continue
        p = [target(draft[:k]) for k in range(depth + 1)]
        for probability, count, uniforms in paths(draft, p, q):
            accepted, own = controlled.run(draft, None if deterministic else tensor(q), tensor(p), uniforms)
            assert accepted == count
            for token, weight in enumerate(own):
                start = (*draft[:count], token)
                for rest in itertools.product(range(vocab), repeat=depth - count):
                    chain = float(drafted * probability) * weight
                    for position, following in enumerate(rest):
                        chain *= float(target((*start, *rest[:position]))[following])
                    found[(*start, *rest)] += chain
    return found


def exact(target: Model, length: int) -> dict[Any, float]:
    vocab = len(target(()))
    out = {}
    for tokens in itertools.product(range(vocab), repeat=length):
        probability = Fraction(1)
        for k, token in enumerate(tokens):
            probability *= target(tokens[:k])[token]
        out[tokens] = float(probability)
    return out


def random_model(vocab: int, depth: int, seed: int, zeros: bool) -> Model:
    """Random distributions in 64ths (exact in binary), a different one after every history."""
    generator = torch.Generator().manual_seed(seed)
    table = {}
    for length in range(depth + 1):
        for history in itertools.product(range(vocab), repeat=length):
            weights = torch.rand(vocab, generator=generator)
            if zeros:
                weights[torch.randint(vocab, (1,), generator=generator)] = 0
            parts = (weights / weights.sum() * 64).long().tolist()
            parts[parts.index(max(parts))] += 64 - sum(parts)
            table[history] = fractions(*parts)
    return table.__getitem__


def distance(a: dict[Any, float], b: dict[Any, float]) -> float:
    assert a.keys() == b.keys()
    return max(abs(a[key] - b[key]) for key in a)


@pytest.mark.parametrize(
    ("draft", "choices", "accepted", "following"),
    [
        ([1, 2, 3], [1, 2, 3, 4], 3, 4),  # all kept, 4 is the bonus
        ([1, 2, 3], [1, 0, 3, 4], 1, 0),  # the hit after a miss does not count
        ([1, 2, 3], [5, 2, 3, 4], 0, 5),
        ([1, 2, 3], [1, 2, 5, 4], 2, 5),
        ([3], [3, 3], 1, 3),
        ([3], [2, 3], 0, 2),
    ],
)
def test_greedy_keeps_drafts_up_to_the_first_miss(
    draft: list[int], choices: list[int], accepted: int, following: int
) -> None:
    assert verify_greedy(torch.tensor(draft), one_hot_logits(choices)) == Verdict(accepted, following)


@pytest.mark.parametrize(("vocab", "depth"), [(3, 1), (3, 2), (3, 3), (4, 1), (4, 2), (5, 1), (5, 2)])
@pytest.mark.parametrize("zeros", [False, True])
def test_law_of_sampled_drafts_is_the_targets(controlled: Controlled, vocab: int, depth: int, zeros: bool) -> None:
    target = random_model(vocab, depth, seed=10 * vocab + depth, zeros=zeros)
    drafter = random_model(vocab, depth, seed=999 + 10 * vocab + depth, zeros=zeros)
    assert distance(law(controlled, target, drafter, depth, False), exact(target, depth + 1)) < 1e-12


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_law_is_the_targets_where_draft_and_target_agree(controlled: Controlled, depth: int) -> None:
    target = random_model(3, depth, seed=depth, zeros=False)
    assert distance(law(controlled, target, target, depth, False), exact(target, depth + 1)) < 1e-12


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_law_is_the_targets_where_supports_are_disjoint(controlled: Controlled, depth: int) -> None:
    def target(history: tuple[int, ...]) -> list[Fraction]:
        return fractions(3, 1, 0, 0) if len(history) % 2 else fractions(0, 1, 7, 0)

    def drafter(history: tuple[int, ...]) -> list[Fraction]:
        return fractions(0, 0, 1, 1) if len(history) % 2 else fractions(1, 0, 0, 3)

    assert distance(law(controlled, target, drafter, depth, False), exact(target, depth + 1)) < 1e-12


@pytest.mark.parametrize(("vocab", "depth"), [(3, 3), (4, 2), (5, 2)])
@pytest.mark.parametrize("zeros", [False, True])
def test_law_of_deterministic_drafts_is_the_targets(
    controlled: Controlled, vocab: int, depth: int, zeros: bool
) -> None:
    target = random_model(vocab, depth, seed=vocab, zeros=zeros)

    def drafter(history: tuple[int, ...]) -> list[Fraction]:
        chosen = (sum(history) + 1) % vocab
        return [Fraction(int(token == chosen)) for token in range(vocab)]

    assert distance(law(controlled, target, drafter, depth, True), exact(target, depth + 1)) < 1e-12


def test_enumeration_sees_greedy_drafts_verified_with_the_soft_q(controlled: Controlled) -> None:
    p, soft = fractions(4, 3, 2, 1), fractions(1, 2, 3, 4)
    draft = (3,)  # argmax of soft, not drawn from it: p / q = .1 / .4
    out = [0.0] * 4
    for probability, count, uniforms in paths(draft, [p, p], [soft]):
        _, own = controlled.run(draft, tensor([soft]), tensor([p, p]), uniforms)
        if count:
            out[3] += float(probability)
        else:
            out = [a + float(probability) * b for a, b in zip(out, own, strict=True)]
    assert out == pytest.approx([0.5625, 0.1875, 0.0, 0.25], abs=1e-9)  # worked out by hand: not p


def test_expected_acceptance_of_the_block_verification_example(controlled: Controlled) -> None:
    p, q = fractions(1, 2), fractions(2, 1)
    total = Fraction(0)
    for draft in itertools.product(range(2), repeat=2):
        drafted = q[draft[0]] * q[draft[1]]
        for probability, count, uniforms in paths(draft, [p] * 3, [q] * 2):
            assert controlled.run(draft, tensor([q] * 2), tensor([p] * 3), uniforms)[0] == count
            total += drafted * probability * count
    assert total == Fraction(10, 9)  # alpha = 2/3: alpha + alpha ** 2


@pytest.mark.parametrize(("u", "accepted"), [(0.0, 1), (0.4999999, 1), (0.5, 0), (0.5000001, 0), (0.9999999, 0)])
def test_acceptance_boundary_is_p_over_q(controlled: Controlled, u: float, accepted: int) -> None:
    p, q = tensor([[Fraction(1, 4), Fraction(3, 4)]] * 2), tensor([fractions(1, 1)])
    assert controlled.run((0,), q, p, [u])[0] == accepted


def test_drafts_that_the_target_likes_more_are_always_kept(controlled: Controlled) -> None:
    p, q = tensor([fractions(1, 3)] * 2), tensor([fractions(1, 1)])
    assert controlled.run((1,), q, p, [1 - 2**-53])[0] == 1
    assert controlled.run((1,), p[:1], p, [1 - 2**-53])[0] == 1  # p = q


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_token_the_target_excludes_is_never_kept(controlled: Controlled, deterministic: bool) -> None:
    p = tensor([fractions(0, 1, 3)] * 2)
    q = None if deterministic else tensor([fractions(2, 1, 1)])
    accepted, own = controlled.run((0,), q, p, [0.0])
    assert accepted == 0
    assert own[0] == 0


def test_every_draft_is_judged_by_its_own_uniform(controlled: Controlled) -> None:
    p, q = tensor([fractions(1, 3)] * 4), tensor([fractions(1, 1)] * 3)  # token 0 is kept iff u < 1/2
    for uniforms, accepted in (([0.4, 0.6, 0.4], 1), ([0.4, 0.4, 0.6], 2), ([0.4, 0.4, 0.4], 3), ([0.6, 0.4, 0.4], 0)):
        assert controlled.run((0, 0, 0), q, p, uniforms)[0] == accepted


def test_bonus_comes_from_the_row_after_the_last_draft(controlled: Controlled) -> None:
    p = tensor([fractions(1, 1, 2), fractions(2, 1, 1), fractions(1, 2, 1)])
    assert controlled.run((2, 0), None, p, [0.0, 0.0]) == (2, [0.25, 0.5, 0.25])


def test_residual_of_deterministic_drafts_is_the_target_without_the_draft(controlled: Controlled) -> None:
    assert controlled.run((0,), None, tensor([fractions(2, 1, 1)] * 2), [0.9]) == (0, [0.0, 0.5, 0.5])


@pytest.mark.parametrize("seed", range(20))
def test_residual_is_the_normalised_positive_part(seed: int) -> None:
    p, q = (random_model(5, 0, seed=100 * which + seed, zeros=seed % 2 == 0)(()) for which in (1, 2))
    left = [max(Fraction(0), a - b) for a, b in zip(p, q, strict=True)]
    wanted = [float(x / sum(left)) for x in left]
    assert p != q
    assert residual(tensor([p])[0], tensor([q])[0]).tolist() == pytest.approx(wanted, abs=1e-12)


def test_residual_of_equal_distributions_is_the_target_itself() -> None:
    p = tensor([fractions(5, 2, 1)])[0]
    assert torch.equal(residual(p, p.clone()), p)


def test_same_generator_state_gives_the_same_verdict_and_another_seed_others() -> None:
    p, q = tensor([fractions(1, 2, 3, 4)] * 4), tensor([fractions(4, 3, 2, 1)] * 3)
    draft = torch.tensor([0, 1, 2])
    runs = [verify_sampled(draft, q, p, torch.Generator().manual_seed(seed)) for seed in [*range(20), *range(20)]]
    assert runs[:20] == runs[20:]
    assert len(set(runs)) > 1


def test_wrong_row_counts_are_refused() -> None:
    p, q = tensor([fractions(1, 1)] * 3), tensor([fractions(1, 1)] * 2)
    draft = torch.tensor([0, 1])
    for wrong in (p[:2], torch.cat([p, p])):
        with pytest.raises(ValueError, match="K \\+ 1 = 3 rows for K = 2"):
            verify_greedy(draft, wrong)
        with pytest.raises(ValueError, match="K \\+ 1 = 3 rows for K = 2"):
            verify_sampled(draft, q, wrong, None)
    with pytest.raises(ValueError, match="K = 2 rows, got 1"):
        verify.verify_sampled(draft, q[:1], p, None)
