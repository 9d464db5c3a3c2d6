"""Random target and draft models in exact fractions, and the laws that follow from them."""

import itertools
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import torch

Tokens = tuple[int, ...]
Model = Callable[[Tokens], list[Fraction]]
"""Tokens so far -> distribution of the next one."""


def tensor(rows: list[list[Fraction]]) -> torch.Tensor:
    return torch.tensor([[[float(x) for x in row] for row in rows]], dtype=torch.float64)


def fractions(*numerators: int) -> list[Fraction]:
    total = sum(numerators)
    return [Fraction(n, total) for n in numerators]


def random_model(vocab: int, depth: int, seed: int, zeros: bool) -> Model:
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


def greedy_of(vocab: int) -> Model:
    """A drafter that always proposes one token."""
    return lambda history: [Fraction(int(token == (sum(history) + 1) % vocab)) for token in range(vocab)]


def chain_probability(model: Model, tokens: Tokens, start: int = 0) -> Fraction:
    """Of tokens[start:] after tokens[:start]."""
    probability = Fraction(1)
    for position in range(start, len(tokens)):
        probability *= model(tokens[:position])[tokens[position]]
    return probability


def exact(target: Model, length: int) -> dict[Tokens, float]:
    vocab = len(target(()))
    return {
        tokens: float(chain_probability(target, tokens)) for tokens in itertools.product(range(vocab), repeat=length)
    }


def completed(target: Model, start: Tokens, length: int) -> Iterator[tuple[Tokens, float]]:
    """`start` continued by the target itself."""
    vocab = len(target(()))
    for rest in itertools.product(range(vocab), repeat=length - len(start)):
        tokens = (*start, *rest)
        yield tokens, float(chain_probability(target, tokens, len(start)))


def distance(a: dict[Any, float], b: dict[Any, float]) -> float:
    assert a.keys() == b.keys()
    return max(abs(a[key] - b[key]) for key in a)
