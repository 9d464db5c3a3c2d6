"""One round for B sequences: from a draft and the target's logits to what is kept, whatever the draft's shape and rule.

Rows of a verification step: row 0 reads the last committed token, row i + 1 reads draft i. Row r's logits predict the
token after what row r has read.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from eval.sampling import SamplingConfig
from eval.verify import (
    Dice,
    Verdict,
    verify_block,
    verify_greedy,
    verify_token,
    verify_tree_greedy,
    verify_tree_sampled,
)
from train.drafters.base import Draft

Rule = Literal["token", "block"]
"""How sampled chains are verified; trees have one rule of their own."""


@dataclass(frozen=True)
class Outcome:
    """What a round keeps of each sequence."""

    path: Tensor
    """(B, P) int64: the rows that are committed, row 0 first, padded with the last row's number."""
    counts: Tensor
    """(B,) int64: how many of them count, 1 + drafts kept."""
    next_token: Tensor
    """(B,) int64: the target's own token after them."""

    def committed(self, draft: Draft) -> list[list[int]]:
        """For each sequence the tokens added to the text: the drafts kept, then the target's own."""
        drafted = draft.tokens.gather(1, (self.path - 1).clamp_min(0)).tolist() if self.path.shape[1] > 1 else None
        out = []
        for row, (count, own) in enumerate(zip(self.counts.tolist(), self.next_token.tolist(), strict=True)):
            out.append([*(drafted[row][1:count] if drafted else []), own])
        return out


def ancestor_mask(draft: Draft) -> Tensor | None:
    """(B, N + 1, N + 1) bool: which rows of the verification step each row may see; None for chains (all earlier)."""
    if draft.parents is None:
        return None
    batch, nodes = draft.parents.shape
    mask = torch.eye(nodes + 1, dtype=torch.bool, device=draft.parents.device).repeat(batch, 1, 1)
    mask[:, :, 0] = True
    sequences = torch.arange(batch, device=mask.device)
    for node in range(nodes):  # parents come before children
        mask[:, node + 1] |= mask[sequences, draft.parents[:, node] + 1]
    return mask


def verify_round(draft: Draft, logits: Tensor, sampling: SamplingConfig, rule: Rule, dice: Dice) -> Outcome:
    """Verify one proposal.

    Args:
        draft: the proposal.
        logits: (B, N + 1, V) of the target, penalties applied.
        sampling: greedy or not, and the processors.
        rule: of sampled chains.
        dice: source of randomness.
    """
    if draft.parents is not None:
        return _verify_trees(draft, draft.parents, logits, sampling, dice)
    verdict: Verdict
    if sampling.greedy:
        verdict = verify_greedy(draft.tokens, logits, draft.num_drafts)
    else:
        verify = verify_block if rule == "block" else verify_token
        verdict = verify(draft.tokens, draft.probs, sampling.probs(logits), dice, draft.num_drafts)
    rows = torch.arange(logits.shape[1], device=logits.device).expand(len(logits), -1)
    return Outcome(rows, verdict.num_accepted + 1, verdict.next_token)


def _verify_trees(draft: Draft, parents: Tensor, logits: Tensor, sampling: SamplingConfig, dice: Dice) -> Outcome:
    probs = None if sampling.greedy else sampling.probs(logits)
    paths, own = [], []
    for row in range(len(logits)):
        if probs is None:
            path, token = verify_tree_greedy(draft.tokens[row], parents[row], logits[row])
        else:
            drawn_from = None if draft.probs is None else draft.probs[row]
            path, token = verify_tree_sampled(draft.tokens[row], parents[row], drawn_from, probs[row], dice)
        paths.append([0, *(node + 1 for node in path)])
        own.append(token)
    width = max(map(len, paths))
    padded = [path + path[-1:] * (width - len(path)) for path in paths]
    device = logits.device
    return Outcome(
        torch.tensor(padded, device=device), torch.tensor([len(path) for path in paths], device=device),
        torch.tensor(own, device=device),
    )  # fmt: skip
