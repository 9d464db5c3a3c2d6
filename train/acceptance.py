"""The round-walk estimator: the acceptance length that greedy decoding would have, from one pass over known text.

On text that the target wrote greedily, the drafter's greedy drafts at every row are computed at once. The walk starts
at the last prompt token; each round keeps the leading drafts that equal the text, then jumps past them and past the
token that the target itself adds. Marginal accuracies are no substitute: neither their product nor their average over
all rows is what decoding reaches (acceptance_length = mean accepted + 1 over *rounds*).

In exact arithmetic the rounds equal the decoder's, one by one. Both cut the last round the same way: drafted tokens
beyond the end of the answer are not counted.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from data.batch import Batch, TargetFeatures
from train.drafters.base import Drafter
from train.drafters.rows import LABEL_OFFSET


@dataclass(frozen=True)
class Acceptance:
    """Counts over rounds, and the rates that follow from them (definitions: README, "What is measured")."""

    num_accepted: tuple[int, ...]
    """Drafted tokens kept, round by round."""
    num_draft_tokens: int
    """K."""

    @property
    def acceptance_length(self) -> float:
        """Mean tokens committed per target forward, bonus included: in [1, K + 1]. 1.0 without a round."""
        return 1 + sum(self.num_accepted) / max(1, len(self.num_accepted))

    @property
    def joint_rates(self) -> list[float]:
        """P(the first k drafts are kept), k = 1..K; acceptance_length = 1 + their sum."""
        rounds = max(1, len(self.num_accepted))
        return [sum(n >= k for n in self.num_accepted) / rounds for k in range(1, self.num_draft_tokens + 1)]

    @property
    def conditional_rates(self) -> list[float | None]:
        """P(draft k is kept given that k - 1 were); None where that never happened."""
        joint = [1.0, *self.joint_rates]
        return [after / before if before else None for before, after in pairwise(joint)]


def walk(accepted_if_started: list[int], num_tokens: int) -> list[int]:
    """Rounds over one answer.

    Args:
        accepted_if_started: for each token i of the answer but the last, how many drafts a round that starts after
            token i would keep (already cut at the end of the answer).
        num_tokens: tokens of the answer; the first comes from the prompt's own forward pass.

    Returns:
        num_accepted of each round.
    """
    rounds = []
    position = 0  # last committed token of the answer
    while position < num_tokens - 1:
        rounds.append(accepted_if_started[position])
        position += accepted_if_started[position] + 1
    return rounds


@torch.no_grad()
def round_walk(drafter: Drafter, batch: Batch, features: TargetFeatures, num_draft_tokens: int) -> list[list[int]]:
    """Rounds of every document in a batch of greedy on-policy text.

    Args:
        drafter: in evaluation, in the dtype to be reported on.
        batch: packed documents, each with one answer at its end.
        features: the target's.
        num_draft_tokens: K.

    Returns:
        num_accepted of each round, document by document in pack order.
    """
    drafts = drafter.greedy_drafts(batch, features, num_draft_tokens).flatten(0, 1)  # (R, K)
    kept = _leading_matches(drafts, batch)
    mask = batch.loss_mask.flatten()
    rounds = []
    for start, end in batch.document_spans():
        answer = torch.nonzero(mask[start:end]).flatten() + start
        if len(answer) == 0:
            continue
        first, last = int(answer[0]), int(answer[-1])
        # The round after token i drafts from row i - 1: features up to i - 1 and the embedding of token i.
        counts = [min(int(kept[token - 1]), last - token) for token in range(first, last)]
        rounds.append(walk(counts, last - first + 1))
    return rounds


def _leading_matches(drafts: Tensor, batch: Batch) -> Tensor:
    """(R,) how many leading drafts of each row equal the text that follows it (row t, draft k <-> token t + 2 + k)."""
    text = torch.stack(
        [batch.input_ids.roll(-(LABEL_OFFSET + k), dims=1).flatten() for k in range(drafts.shape[1])], dim=-1
    )
    return (drafts == text).long().cumprod(dim=1).sum(dim=1)
