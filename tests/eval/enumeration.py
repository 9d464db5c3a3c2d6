"""Every outcome of code that decides by `eval.verify.Dice`, with its probability: the very code runs, not a copy."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


class Script:
    """Dice that follow a given sequence of choices, then take the first possible one; they note what was possible."""

    def __init__(self, choices: list[int]) -> None:
        self.choices = choices
        self.taken: list[tuple[int, int]] = []  # (choice, number of choices)
        self.weight = 1.0

    def _choose(self, weights: list[float]) -> int:
        possible = [index for index, weight in enumerate(weights) if weight > 0]
        choice = self.choices[len(self.taken)] if len(self.taken) < len(self.choices) else 0
        self.taken.append((choice, len(possible)))
        self.weight *= weights[possible[choice]]
        return possible[choice]

    def accept(self, probability: Tensor) -> Tensor:
        flags = [self._choose([p, 1 - p]) == 0 for p in probability.double().flatten().tolist()]
        return torch.tensor(flags, dtype=torch.bool).view(probability.shape)

    def draw(self, probs: Tensor) -> Tensor:
        rows = probs.double() / probs.double().sum(dim=-1, keepdim=True)
        return torch.tensor([self._choose(row) for row in rows.tolist()])


def outcomes(run: Callable[[Any], Any]) -> Iterator[tuple[float, Any]]:
    """(probability, result) of every way that `run(dice)` can end."""
    choices: list[int] = []
    while True:
        script = Script(choices)
        result = run(script)
        yield script.weight, result
        taken = script.taken
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken.pop()
        if not taken:
            return
        choices = [choice for choice, _ in taken]
        choices[-1] += 1
