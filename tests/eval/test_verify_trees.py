"""Trees: greedy paths by hand, and the exact law of recursive rejection by enumerating the rule itself."""

import itertools
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch

from eval.verify import verify_tree_greedy, verify_tree_sampled
from tests.eval.enumeration import outcomes
from tests.eval.models import Model, Tokens, completed, distance, exact, fractions, random_model, tensor


def one_hot_logits(choices: list[int], vocab: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(choices), vocab).double()


def ordered_draws(q: list[Fraction], count: int) -> Iterator[tuple[Tokens, Fraction]]:
    """Sequences of `count` different tokens drawn from q without replacement, with their probabilities."""
    if count == 0:
        yield (), Fraction(1)
        return
    for token, probability in enumerate(q):
        if probability == 0:
            continue
        left = [Fraction(0) if other == token else x for other, x in enumerate(q)]
        total = sum(left)
        for rest, weight in ordered_draws([x / total for x in left] if total else left, count - 1):
            yield (token, *rest), probability * weight


def trees(drafter: Model, branches: list[int], history: Tokens = ()) -> Iterator[tuple[Any, Fraction]]:
    """Every tree of that shape as nested ((token, subtree), ...), with its probability."""
    if not branches:
        yield (), Fraction(1)
        return
    for tokens, drawn in ordered_draws(drafter(history), branches[0]):
        below = [list(trees(drafter, branches[1:], (*history, token))) for token in tokens]
        for chosen in itertools.product(*below):
            weight = drawn
            for _, part in chosen:
                weight *= part
            yield tuple((token, tree) for token, (tree, _) in zip(tokens, chosen, strict=True)), weight


def flattened(tree: Any) -> tuple[list[int], list[int], list[Tokens]]:
    """Tokens, parents and paths of a nested tree, breadth first."""
    tokens, parents, paths = [], [], []
    level = [(-1, (), tree)]
    while level:
        following = []
        for parent, path, children in level:
            for token, subtree in children:
                tokens.append(token)
                parents.append(parent)
                paths.append((*path, token))
                following.append((len(tokens) - 1, paths[-1], subtree))
        level = following
    return tokens, parents, paths


def tree_law(target: Model, drafter: Model, branches: list[int], one_hot: bool) -> tuple[dict[Tokens, float], float]:
    """Joint law of the first depth + 1 tokens, and the expected number of drafts kept."""
    vocab, length = len(target(())), len(branches) + 1
    found: dict[Tokens, float] = dict.fromkeys(itertools.product(range(vocab), repeat=length), 0.0)
    accepted = 0.0
    for tree, drafted in trees(drafter, branches):
        tokens, parents, paths = flattened(tree)
        histories = [(), *paths]
        p = tensor([target(history) for history in histories])[0]
        q = None if one_hot else tensor([drafter(history) for history in histories])[0]
        arguments = (torch.tensor(tokens), torch.tensor(parents), q, p)
        for weight, (path, own) in outcomes(lambda dice, a=arguments: verify_tree_sampled(*a, dice)):
            accepted += float(drafted) * weight * len(path)
            kept = (*(paths[path[-1]] if path else ()), own)
            for outcome, rest in completed(target, kept, length):
                found[outcome] += float(drafted) * weight * rest
    return found, accepted


@pytest.mark.parametrize(
    ("vocab", "branches"),
    [(3, [1]), (3, [2]), (3, [3]), (4, [3]), (3, [2, 1]), (3, [1, 2]), (3, [2, 2]), (3, [1, 1, 1])],
)
@pytest.mark.parametrize("zeros", [False, True])
def test_law_of_trees_drawn_without_replacement_is_the_targets(vocab: int, branches: list[int], zeros: bool) -> None:
    if zeros and max(branches) == vocab:
        pytest.skip("a distribution with a zero has no such draw")
    depth = len(branches)
    target = random_model(vocab, depth, seed=vocab, zeros=zeros)
    drafter = random_model(vocab, depth, seed=77 + vocab, zeros=zeros)
    found, _ = tree_law(target, drafter, branches, one_hot=False)
    assert distance(found, exact(target, depth + 1)) < 1e-12


@pytest.mark.parametrize("branches", [[1], [2], [3], [2, 2]])
def test_law_of_deterministic_trees_is_the_targets(branches: list[int]) -> None:
    """Children are always the same tokens: verified as one-hot, whatever they were chosen by."""
    target = random_model(4, len(branches), seed=3, zeros=True)
    tree: Any = ()
    for branch in reversed(branches):
        tree = tuple((token, tree) for token in range(branch))
    tokens, parents, paths = flattened(tree)
    p = tensor([target(history) for history in [(), *paths]])[0]
    found: dict[Tokens, float] = dict.fromkeys(itertools.product(range(4), repeat=len(branches) + 1), 0.0)
    ids, above = torch.tensor(tokens), torch.tensor(parents)
    for weight, (path, own) in outcomes(lambda dice: verify_tree_sampled(ids, above, None, p, dice)):
        kept = (*(paths[path[-1]] if path else ()), own)
        for outcome, rest in completed(target, kept, len(branches) + 1):
            found[outcome] += weight * rest
    assert distance(found, exact(target, len(branches) + 1)) < 1e-12


def test_more_siblings_never_keep_less() -> None:
    target, drafter = (random_model(4, 1, seed=seed, zeros=False) for seed in (1, 2))
    kept = [tree_law(target, drafter, [branch], one_hot=False)[1] for branch in (1, 2, 3, 4)]
    assert kept == sorted(kept)
    assert kept[-1] == pytest.approx(1)  # every token was drafted


def test_sibling_example_of_the_specification() -> None:
    """acceptance.md 3.5: p = (.4, .3, .2, .1), q reversed, 1 to 4 siblings."""
    p, q = fractions(4, 3, 2, 1), fractions(1, 2, 3, 4)
    kept = [tree_law(lambda _: p, lambda _: q, [branch], one_hot=False)[1] for branch in (1, 2, 3, 4)]
    assert kept == pytest.approx([0.6, 0.764, 0.840, 1.0], abs=5e-4)


def test_siblings_without_any_draft_probability_are_passed_over() -> None:
    """Where fewer tokens than branches had any probability, the rest of the draw is filling."""
    p, q = tensor([fractions(1, 1, 2)] * 3)[0], tensor([fractions(0, 1, 0)] * 3)[0]
    law = [0.0] * 3
    ids, parents = torch.tensor([1, 0]), torch.tensor([-1, -1])
    for weight, (path, own) in outcomes(lambda dice: verify_tree_sampled(ids, parents, q, p, dice)):
        law[int(ids[path[0]]) if path else own] += weight
    assert law == pytest.approx([0.25, 0.25, 0.5], abs=1e-12)


@pytest.mark.parametrize(
    ("choices", "path", "own"),
    [
        # root -> 5 (node 0), 6 (node 1); 5 -> 7 (node 2); 6 -> 5 (node 3)
        ([5, 7, 0, 4, 0], [0, 2], 4),
        ([6, 0, 5, 0, 3], [1, 3], 3),
        ([6, 7, 7, 0, 0], [1], 7),
        ([4, 7, 5, 0, 0], [], 4),
    ],
)
def test_greedy_follows_the_path_of_argmaxes(choices: list[int], path: list[int], own: int) -> None:
    tokens, parents = torch.tensor([5, 6, 7, 5]), torch.tensor([-1, -1, 0, 1])
    assert verify_tree_greedy(tokens, parents, one_hot_logits(choices, 8)) == (path, own)
