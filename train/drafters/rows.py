"""Alignment as data: which row reads what and is judged by what. Used by trainer and decoder alike.

Notation: tokens x_0, x_1, ...; row t holds the target's features after reading x_t; p_t is the target's distribution
after x_t, so it predicts x_{t+1}. An answer is a run of tokens with loss_mask True.

A chain drafter (EAGLE-3) at row t, step k:

    reads      step 0: features of row t       step k >= 1: its own output of step k - 1 at row t
               and the embedding of x_{t+1+k}
    position   t + k
    attends    step-0 rows <= t of its document, and its own steps 1..k at row t
    predicts   x_{t+2+k}, taught by p_{t+1+k}
    counts     iff x_{t+1}, ..., x_{t+2+k} all belong to one answer: exactly the drafts that serving can make, from
               the first (after the prompt, row t = last prompt token) to the one that predicts the end of turn

Example, prompt a b, answer C D E, k = 0: row 1 (b) reads emb(C), predicts D; row 2 (C) reads emb(D), predicts E.
Row 0 does not count (x_1 = b is prompt), nor does row 3 (x_5 does not exist). For k = 1: row 1 predicts E.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from data.batch import Batch

LABEL_OFFSET = 2
"""Row t at step 0 predicts token t + 2: the target itself already gives token t + 1."""


@dataclass(frozen=True)
class ChainLabels:
    """Every token that some step of a chain drafter is taught to predict, as indices into the flattened rows."""

    label: Tensor
    """(N,) int64 ascending, flattened index j of the predicted token x_j; its teacher is row j - 1."""
    taught: tuple[Tensor, ...]
    """S tensors (N_k,) int64 ascending: which of the labels step k predicts."""

    def rows(self, step: int) -> Tensor:
        """(N_k,) ascending: the rows that predict at `step`, one for each label taught there. Each step's rows are
        among those of the step before, whose output they read."""
        return self.label[self.taught[step]] - LABEL_OFFSET - step


def answer_run_lengths(batch: Batch) -> Tensor:
    """(B, T) int64: how many tokens of one answer end at each token, itself included; 0 outside answers.

    A new document ends a run even if both sides of the border are supervised.
    """
    mask = batch.loss_mask
    new_document = torch.ones_like(mask)
    new_document[:, 1:] = batch.document_ids[:, 1:] != batch.document_ids[:, :-1]
    starts = mask & (new_document | ~_previous(mask))
    columns = torch.arange(mask.shape[1], device=mask.device).expand_as(batch.input_ids)
    run_start = torch.where(starts, columns, 0).cummax(dim=1).values
    return torch.where(mask, columns - run_start + 1, 0)


def chain_labels(batch: Batch, num_steps: int, keep_ratio: float = 1.0) -> ChainLabels:
    """The labels of a chain drafter with `num_steps` steps.

    Args:
        batch: packed documents.
        num_steps: S.
        keep_ratio: share of a step's rows that the next step goes on from, chosen by `batch.uniforms`.
    """
    # A row must lie in its label's document: position_ids say how many tokens of it come before.
    depth = torch.minimum(answer_run_lengths(batch), batch.position_ids).flatten() - LABEL_OFFSET + 1
    label = torch.nonzero(depth >= 1).squeeze(1)
    taught = []
    for step in range(num_steps):
        members = torch.nonzero(depth[label] > step).squeeze(1)
        if keep_ratio < 1:
            rows = label[members] - LABEL_OFFSET - step
            members = members[batch.uniforms.flatten()[rows] < keep_ratio**step]
        taught.append(members)
    return ChainLabels(label=label, taught=tuple(taught))


def shifted_ids(batch: Batch, offset: int) -> Tensor:
    """(B * T,) int64: token `offset` places after each row. Past the end of a pack the ids repeat and do not count."""
    return batch.input_ids.roll(-offset, dims=1).flatten()


def _previous(mask: Tensor) -> Tensor:
    """`mask` of the token before; False before the first."""
    return torch.nn.functional.pad(mask[:, :-1], (1, 0))
