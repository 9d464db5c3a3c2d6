"""Drafters that read the text themselves: a draft model, or the first layers of the target.

Their distribution at row j follows from the tokens up to j alone, and the target's features do not enter. So one pass
over known text gives every step at once: step k after row t is row t+1+k, which predicts x_{t+2+k} and is taught by p
at the same row.

Shape letters as in `train.drafters.base`; R = flattened rows B * T; D' = the reader's own width.
"""

from abc import abstractmethod

import torch
from torch import Tensor

from data.batch import Batch, TargetFeatures
from data.decoder import Decoder
from train.drafters.base import DraftLoss
from train.drafters.distilled import DistilledDrafter
from train.drafters.flops import product_flops
from train.drafters.rows import LABEL_OFFSET, ChainLabels, chain_labels


class Reader(DistilledDrafter):
    """A drafter of this kind."""

    @abstractmethod
    def states(self, batch: Batch, features: TargetFeatures, rows: Tensor) -> Tensor:
        """(M, D'): what the LM head reads at the given flattened rows (M,) of packed text."""

    @abstractmethod
    def reading_flops(self, batch: Batch, rows: int) -> int:
        """Training FLOPs of `states` for so many rows."""

    def logits(self, states: Tensor) -> Tensor:
        """(..., D') -> (..., Vd)."""
        head = self.draft_head
        return torch.nn.functional.linear(states.to(head.dtype), head)

    # --- training ----------------------------------------------------------------------------------------------------

    def loss(self, batch: Batch, features: TargetFeatures) -> DraftLoss:
        """Distillation at every row that a draft may be made from; see Drafter.loss."""
        labels = self._labels(batch)
        states = self.states(batch, features, labels.label - 1)
        return self.distil([states], [self.draft_head], labels, batch, features)

    def flops(self, batch: Batch) -> int:
        """See Drafter.flops."""
        labels = self._labels(batch)
        rows = len(labels.label)
        return self.reading_flops(batch, rows) + product_flops(self.draft_head, rows) + self.teacher_flops(labels)

    def _labels(self, batch: Batch) -> ChainLabels:
        return chain_labels(batch, 1)

    @torch.no_grad()
    def greedy_drafts(self, batch: Batch, features: TargetFeatures, num_draft_tokens: int) -> Tensor:
        """Greedy drafts at every row; see Drafter.greedy_drafts."""
        everywhere = torch.arange(batch.input_ids.numel(), device=batch.input_ids.device)
        logits = self.logits(self.states(batch, features, everywhere))
        best = self.draft_to_target_ids[logits.argmax(dim=-1)].view(batch.input_ids.shape)
        return torch.stack([best.roll(1 - LABEL_OFFSET - k, dims=1) for k in range(num_draft_tokens)], dim=-1)


def require_forgetting(decoder: Decoder, whose: str) -> None:
    """Readers write drafts into the cache that they read the text with.

    Raises:
        ValueError: if layers of the reader have a state that no draft can be taken back from.
    """
    if not decoder.can_forget:
        raise ValueError(
            f"the {whose} has linear-attention layers, whose state cannot forget drafts: a draft_model or early_exit "
            "needs layers with keys and values alone (drafter=mtp, eagle3 or medusa run beside this target)"
        )
