"""Validation during training: the round-walk on the target's own greedy answers to held-out prompts."""

from typing import Any

from data.batch import Wants
from data.packing import collate_alone
from data.regenerate import greedy_answers
from data.target import Target
from train.acceptance import Acceptance, round_walk
from train.drafters.base import Drafter


class Validation:
    """Holds the answers and their features, so that a validation is one pass of the drafter."""

    def __init__(self, target: Target, wants: Wants, prompts: list[list[int]], max_new_tokens: int) -> None:
        """Let the target answer `prompts` (once per run) and capture the features of the answers."""
        answers = greedy_answers(target, prompts, max_new_tokens)
        self._captured = []
        width = max(map(len, answers), default=0)
        for answer in answers:
            batch = collate_alone(answer, width).to(target.device)
            self._captured.append((batch, target.capture(batch, wants)))

    def measure(self, drafter: Drafter, num_draft_tokens: int) -> dict[str, Any]:
        """acceptance_length, joint_rates and conditional_rates for K = num_draft_tokens; {} without prompts."""
        if not self._captured:
            return {}
        drafter.eval()
        accepted = tuple(
            count
            for batch, features in self._captured
            for rounds in round_walk(drafter, batch, features, num_draft_tokens)
            for count in rounds
        )
        acceptance = Acceptance(num_accepted=accepted, num_draft_tokens=num_draft_tokens)
        return {
            "acceptance_length": acceptance.acceptance_length,
            "joint_rates": acceptance.joint_rates,
            "conditional_rates": acceptance.conditional_rates,
        }
