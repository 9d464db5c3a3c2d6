"""Verification rules: greedy by hand, and the exact law of every sampled rule by enumerating the rule itself.

The models are random distributions in 64ths, exact in binary, a different one after every history. `outcomes` drives
the real function down every path of its random decisions; the law of the first tokens is compared with the target's,
worked out in Fractions.
"""

import itertools
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
from scipy import stats

from eval import verify
from eval.verify import (
    Dice,
    residual,
    verify_block,
    verify_greedy,
    verify_token,
)
from tests.eval.enumeration import outcomes
from tests.eval.models import (
    Model,
    Tokens,
    chain_probability,
    completed,
    distance,
    exact,
    fractions,
    greedy_of,
    random_model,
    tensor,
)

RULES = [verify_token, verify_block]


def chain_law(rule: Any, target: Model, drafter: Model, depth: int, one_hot: bool = False) -> dict[Tokens, float]:
    """Joint law of the first K + 1 tokens when a round of K drafts is followed by the target's own tokens."""
    vocab = len(target(()))
    found: dict[Tokens, float] = dict.fromkeys(itertools.product(range(vocab), repeat=depth + 1), 0.0)
    for draft, drafted, weight, verdict in rounds(rule, target, drafter, depth, one_hot):
        kept = (*draft[: int(verdict.num_accepted)], int(verdict.next_token))
        for tokens, rest in completed(target, kept, depth + 1):
            found[tokens] += float(drafted) * weight * rest
    return found


def rounds(rule: Any, target: Model, drafter: Model, depth: int, one_hot: bool = False) -> Iterator[tuple[Any, ...]]:
    """(draft, its probability, probability of the outcome, verdict) of every round."""
    vocab = len(target(()))
    for draft in itertools.product(range(vocab), repeat=depth):
        drafted = chain_probability(drafter, draft)
        if drafted == 0:
            continue
        p = tensor([target(draft[:k]) for k in range(depth + 1)])
        q = None if one_hot else tensor([drafter(draft[:k]) for k in range(depth)])
        ids = torch.tensor([draft])
        for weight, verdict in outcomes(lambda dice, ids=ids, q=q, p=p: rule(ids, q, p, dice)):
            yield draft, drafted, weight, verdict


def expected_accepted(rule: Any, target: Model, drafter: Model, depth: int) -> float:
    return sum(float(d) * w * int(v.num_accepted) for _, d, w, v in rounds(rule, target, drafter, depth))


# --- chains ----------------------------------------------------------------------------------------------------------


def one_hot_logits(choices: list[int], vocab: int = 6) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor([choices]), vocab).double()


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
    verdict = verify_greedy(torch.tensor([draft]), one_hot_logits(choices))
    assert (verdict.num_accepted.tolist(), verdict.next_token.tolist()) == ([accepted], [following])


def test_greedy_rows_are_judged_apart_and_filling_is_no_draft() -> None:
    drafts = torch.tensor([[1, 2], [1, 2], [1, 2], [1, 2]])
    logits = one_hot_logits([1, 2, 4]).repeat(4, 1, 1)
    verdict = verify_greedy(drafts, logits, torch.tensor([2, 1, 0, 2]))
    assert verdict.num_accepted.tolist() == [2, 1, 0, 2]
    assert verdict.next_token.tolist() == [4, 2, 1, 4]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("vocab", "depth"), [(3, 1), (3, 2), (3, 3), (4, 1), (4, 2), (5, 1), (5, 2)])
@pytest.mark.parametrize("zeros", [False, True])
def test_law_of_sampled_drafts_is_the_targets(rule: Any, vocab: int, depth: int, zeros: bool) -> None:
    target = random_model(vocab, depth, seed=10 * vocab + depth, zeros=zeros)
    drafter = random_model(vocab, depth, seed=999 + 10 * vocab + depth, zeros=zeros)
    assert distance(chain_law(rule, target, drafter, depth), exact(target, depth + 1)) < 1e-12


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_law_is_the_targets_where_draft_and_target_agree(rule: Any, depth: int) -> None:
    target = random_model(3, depth, seed=depth, zeros=False)
    assert distance(chain_law(rule, target, target, depth), exact(target, depth + 1)) < 1e-12
    assert expected_accepted(rule, target, target, depth) == pytest.approx(depth)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_law_is_the_targets_where_supports_are_disjoint(rule: Any, depth: int) -> None:
    def target(history: Tokens) -> list[Fraction]:
        return fractions(3, 1, 0, 0) if len(history) % 2 else fractions(0, 1, 7, 0)

    def drafter(history: Tokens) -> list[Fraction]:
        return fractions(0, 0, 1, 1) if len(history) % 2 else fractions(1, 0, 0, 3)

    assert distance(chain_law(rule, target, drafter, depth), exact(target, depth + 1)) < 1e-12
    assert expected_accepted(rule, target, drafter, depth) == 0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("vocab", "depth"), [(3, 3), (4, 2), (5, 2)])
@pytest.mark.parametrize("zeros", [False, True])
def test_law_of_deterministic_drafts_is_the_targets(rule: Any, vocab: int, depth: int, zeros: bool) -> None:
    target = random_model(vocab, depth, seed=vocab, zeros=zeros)
    found = chain_law(rule, target, greedy_of(vocab), depth, one_hot=True)
    assert distance(found, exact(target, depth + 1)) < 1e-12


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("one_hot", [False, True])
def test_law_holds_for_chains_of_different_length_in_one_batch(rule: Any, one_hot: bool) -> None:
    """As many drafts as the first token of the *text* says, not the drafts themselves: rows of 0, 1, 2 and 3."""
    target = random_model(3, 3, seed=5, zeros=True)
    drafter = greedy_of(3) if one_hot else random_model(3, 3, seed=6, zeros=False)
    for count in range(4):
        found: dict[Tokens, float] = dict.fromkeys(itertools.product(range(3), repeat=4), 0.0)
        for draft in itertools.product(range(3), repeat=count):
            drafted = float(chain_probability(drafter, draft))
            if drafted == 0:
                continue
            filled = (*draft, *[2] * (3 - count))
            p = tensor([target(filled[:k]) for k in range(4)])
            q = None if one_hot else tensor([drafter(filled[:k]) for k in range(3)])
            ids, counts = torch.tensor([filled]), torch.tensor([count])
            for weight, verdict in outcomes(lambda dice, i=ids, q=q, p=p, c=counts: rule(i, q, p, dice, c)):
                kept = (*draft[: int(verdict.num_accepted)], int(verdict.next_token))
                for tokens, rest in completed(target, kept, 4):
                    found[tokens] += drafted * weight * rest
        assert distance(found, exact(target, 4)) < 1e-12


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("one_hot", [True, False])
def test_law_of_a_round_without_any_draft_is_the_targets(rule: Any, one_hot: bool) -> None:
    target = random_model(3, 1, seed=7, zeros=True)
    nothing, p = torch.zeros(1, 0, dtype=torch.int64), tensor([target(())])
    q = None if one_hot else torch.zeros(1, 0, 3, dtype=torch.float64)
    found = dict.fromkeys(itertools.product(range(3), repeat=1), 0.0)
    for weight, verdict in outcomes(lambda dice: rule(nothing, q, p, dice)):
        assert int(verdict.num_accepted) == 0
        found[(int(verdict.next_token),)] += weight
    assert distance(found, exact(target, 1)) < 1e-12


@pytest.mark.parametrize("rule", RULES)
def test_enumeration_sees_greedy_drafts_verified_with_the_soft_q(rule: Any) -> None:
    p, soft = fractions(4, 3, 2, 1), fractions(1, 2, 3, 4)
    out = [0.0] * 4
    ids = torch.tensor([[3]])  # argmax of soft, not drawn from it: p / q = .1 / .4
    for weight, verdict in outcomes(lambda dice: rule(ids, tensor([soft]), tensor([p, p]), dice)):
        out[3 if int(verdict.num_accepted) else int(verdict.next_token)] += weight
    assert out == pytest.approx([0.5625, 0.1875, 0.0, 0.25], abs=1e-12)  # worked out by hand: not p


def test_textbook_example_of_block_verification() -> None:
    p, q = fractions(1, 2), fractions(2, 1)
    token, block = (expected_accepted(rule, lambda _: p, lambda _: q, 2) for rule in RULES)
    assert token == pytest.approx(10 / 9, abs=1e-12)  # alpha = 2/3: alpha + alpha ** 2
    assert block == pytest.approx(11 / 9, abs=1e-12)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("depth", [2, 3])
def test_block_keeps_at_least_as_many_as_token_by_token(seed: int, depth: int) -> None:
    target = random_model(3, depth, seed=seed, zeros=seed % 3 == 0)
    drafter = random_model(3, depth, seed=500 + seed, zeros=seed % 2 == 0)
    token, block = (expected_accepted(rule, target, drafter, depth) for rule in RULES)
    assert block >= token - 1e-12


def test_stopping_at_the_first_failure_of_a_block_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The misreading of the rule that was found in the wild; 5/9 of acceptance.md."""

    def first_failure(draft_tokens: Any, draft_probs: Any, target_probs: Any, dice: Any) -> Any:
        class Leading:
            def accept(self, probability: torch.Tensor) -> torch.Tensor:
                return dice.accept(probability).long().cumprod(dim=1).bool()

            draw = staticmethod(dice.draw)

        return verify_block(draft_tokens, draft_probs, target_probs, Leading())  # type: ignore[arg-type]

    p, q = fractions(1, 2), fractions(2, 1)
    assert expected_accepted(first_failure, lambda _: p, lambda _: q, 2) < 10 / 9
    found = chain_law(first_failure, lambda _: p, lambda _: q, 2)
    assert distance(found, exact(lambda _: p, 3)) > 0.05


# --- the pieces ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_residual_is_the_normalised_positive_part(seed: int) -> None:
    p, q = (random_model(5, 0, seed=100 * which + seed, zeros=seed % 2 == 0)(()) for which in (1, 2))
    left = [max(Fraction(0), a - b) for a, b in zip(p, q, strict=True)]
    wanted = [float(x / sum(left)) for x in left]
    assert p != q
    assert residual(tensor([p])[0], tensor([q])[0])[0].tolist() == pytest.approx(wanted, abs=1e-12)


def test_residual_of_equal_distributions_is_the_target_itself() -> None:
    p = tensor([fractions(5, 2, 1)])[0]
    assert torch.equal(residual(p, p.clone()), p)


def test_dice_accept_with_the_probability_given_and_draw_by_the_weights() -> None:
    dice = Dice(torch.Generator().manual_seed(0))
    probability = torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0], dtype=torch.float64)
    seen = torch.stack([dice.accept(probability) for _ in range(20_000)]).sum(0).tolist()
    assert (seen[0], seen[-1]) == (0, 20_000)
    assert all(stats.binomtest(k, 20_000, float(p)).pvalue > 1e-6 for k, p in zip(seen, probability, strict=True))
    weights = torch.tensor([[0.0, 1.0, 3.0]]).repeat(20_000, 1)
    assert stats.binomtest(int((dice.draw(weights) == 2).sum()), 20_000, 0.75).pvalue > 1e-6


def test_every_decision_of_a_round_has_random_numbers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeping and drawing from one uniform would correlate them."""
    asked = []
    rand = torch.rand
    monkeypatch.setattr(torch, "rand", lambda shape, **kw: asked.append(shape) or rand(shape, **kw))
    p, q = tensor([fractions(1, 3)] * 3), tensor([fractions(1, 1)] * 2)
    verify_token(torch.tensor([[0, 0]]), q, p, Dice(torch.Generator().manual_seed(0)))
    assert [tuple(shape) for shape in asked] == [(1, 2)]  # one per draft; the draw has its own


def test_same_generator_state_gives_the_same_verdict_and_another_seed_others() -> None:
    p, q = tensor([fractions(1, 2, 3, 4)] * 4), tensor([fractions(4, 3, 2, 1)] * 3)
    draft = torch.tensor([[0, 1, 2]])
    runs = []
    for seed in [*range(20), *range(20)]:
        verdict = verify_token(draft, q, p, Dice(torch.Generator().manual_seed(seed)))
        runs.append((int(verdict.num_accepted), int(verdict.next_token)))
    assert runs[:20] == runs[20:]
    assert len(set(runs)) > 1


def test_wrong_row_counts_are_refused() -> None:
    p, q = tensor([fractions(1, 1)] * 3), tensor([fractions(1, 1)] * 2)
    draft = torch.tensor([[0, 1]])
    for wrong in (p[:, :2], torch.cat([p, p], dim=1)):
        with pytest.raises(ValueError, match="K \\+ 1 = 3 rows for K = 2"):
            verify_greedy(draft, wrong)
        with pytest.raises(ValueError, match="K \\+ 1 = 3 rows for K = 2"):
            verify_token(draft, q, wrong, Dice(None))
    with pytest.raises(ValueError, match="K = 2 rows, got 1"):
        verify.verify_block(draft, q[:, :1], p, Dice(None))
