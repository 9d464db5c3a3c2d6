"""What drafters that learn the target's distributions share, whatever their layers: labels, teacher, loss.

Step k (training-time-test step or head) at row t predicts x_{t+2+k}; its teacher is the target at row t+1+k
(`train.drafters.rows`). A family computes the hidden states of each step; whatever has the size of a vocabulary happens
here. Shape letters as in `train.drafters.base`; R = flattened rows B * T.
"""

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from conf import config
from data.batch import Batch, TargetFeatures
from data.decoder import TargetParts
from train.drafters.base import DrafterConfig, DraftLoss, Servable
from train.drafters.distillation import Teacher, chunked_distillation
from train.drafters.layers import llama_shape, product_dtype
from train.drafters.losses import LossKind, LossSettings
from train.drafters.rows import ChainLabels
from train.drafters.serial import SerialDrafter


@config
class DistilledConfig(DrafterConfig):
    """What their yamls have in common."""

    init_from: str | None
    """Start from this head: a run or checkpoint of ours, or a folder that another trainer has written. Its draft
    vocabulary is kept."""
    loss: LossKind
    """One of train/drafters/losses.py."""
    lk_scale: float = Field(ge=0)
    """lk_lambda: weight of KL is lk_scale * exp(-lk_decay * alpha)."""
    lk_decay: float = Field(ge=0)
    top_k: int = Field(ge=1)
    """top_k_ce: so many of the target's most likely tokens count more."""
    top_k_weight: float = Field(ge=0)
    """top_k_ce: how much more."""
    loss_temperature: float = Field(gt=0)
    """Of both distributions in the loss; MTP-Boosting takes 2 with `loss: kl`."""
    mask_out_of_vocab: bool
    """Leave out labels whose argmax is outside the draft vocabulary."""
    compile: bool
    """Let torch.compile fuse the layer and the loss: for GPUs, and CPUs with a C++ compiler; the first steps wait."""

    def warm_start(self) -> str | None:
        """See DrafterConfig.warm_start."""
        return self.init_from


@config
class SteppedConfig(DistilledConfig):
    """Of those whose steps are computed apart."""

    step_loss_decay: float = Field(gt=0, le=1)
    """Weight of step k is step_loss_decay ** k."""
    row_keep_ratio: float = Field(gt=0, le=1)
    """Share of a step's rows that the next step goes on from, drawn anew in every epoch and weighted up by as much:
    later steps then cost less and the loss stays unbiased. 1 keeps all."""


class DistilledDrafter(SerialDrafter):
    """Holds the target's frozen matrices and the loss."""

    settings: DistilledConfig
    target_to_draft_ids: Tensor
    """(V,) int64 buffer, -1 for tokens outside the draft vocabulary."""
    embed_tokens: Tensor
    """(V, D) buffer, the target's own."""
    target_head: Tensor
    """(V, D) buffer, the target's LM head."""
    teacher_rows: Tensor
    """(Vd, D) buffer, its rows that the drafter can propose."""

    def __init__(self, settings: DistilledConfig, target: TargetParts, draft_to_target_ids: Tensor) -> None:
        super().__init__()
        self.settings = settings
        self.shape = llama_shape(target.config)
        self.target_vocab_size = self.shape.vocab_size
        self.register_buffer("draft_to_target_ids", draft_to_target_ids.clone())
        inverse = torch.full((self.target_vocab_size,), -1)
        inverse[draft_to_target_ids] = torch.arange(len(draft_to_target_ids))
        self.register_buffer("target_to_draft_ids", inverse, persistent=False)
        self.register_buffer("embed_tokens", target.embed_tokens.detach(), persistent=False)
        self.register_buffer("target_head", target.lm_head.detach(), persistent=False)
        self.register_buffer("teacher_rows", target.lm_head.detach()[draft_to_target_ids], persistent=False)

    @property
    def draft_head(self) -> Tensor:
        """(Vd, D), the LM head: the target's rows, unless a family has its own."""
        return self.teacher_rows

    def last_hidden(self, features: TargetFeatures) -> Tensor:
        """(B, M, ...) features -> (B * M, D), the target's state after its final norm, as trained weights read it."""
        assert features.last_hidden_state is not None  # asked for in `wants`
        return features.last_hidden_state.flatten(0, 1).to(next(self.parameters()).dtype)

    def aux_hidden(self, features: TargetFeatures) -> Tensor:
        """(B, M, ...) features -> (B * M, A * D), the auxiliary states side by side, as trained weights read them."""
        return features.aux_hidden_states.flatten(0, 1).to(next(self.parameters()).dtype)

    def distil(
        self,
        hidden: Sequence[Tensor],
        heads: Sequence[Tensor],
        labels: ChainLabels,
        batch: Batch,
        features: TargetFeatures,
        step_loss_decay: float = 1.0,
        row_keep_ratio: float = 1.0,
    ) -> DraftLoss:
        """The loss of all steps.

        Args:
            hidden: for each step (N_k, D), what the LM head reads, at `labels.rows(k)`.
            heads: (Vd, D), the LM head: one for all steps, or one for each.
            labels: who predicts what.
            batch: the text.
            features: with the last hidden state.
            step_loss_decay: as in SteppedConfig.
            row_keep_ratio: as in SteppedConfig.
        """
        assert features.last_hidden_state is not None  # asked for in `wants`
        teacher = Teacher(
            hidden=features.last_hidden_state.flatten(0, 1),
            lm_head=self.target_head,
            draft_head=self.teacher_rows,
            draft_to_target_ids=self.draft_to_target_ids,
            token_ids=self.target_to_draft_ids[batch.input_ids.flatten()],
        )
        total, losses, matches = chunked_distillation(
            [rows.to(product_dtype(rows)) for rows in hidden],
            heads,
            teacher,
            labels,
            batch.token_weights.flatten(),
            self.loss_settings(len(hidden), step_loss_decay, row_keep_ratio),
        )
        return DraftLoss(loss=total, step_losses=losses, step_matches=matches)

    def loss_settings(self, num_steps: int, step_loss_decay: float, row_keep_ratio: float) -> LossSettings:
        """The yaml's values as the loss takes them."""
        chosen = self.settings
        return LossSettings(
            kind=chosen.loss,
            lk_scale=chosen.lk_scale,
            lk_decay=chosen.lk_decay,
            top_k=chosen.top_k,
            top_k_weight=chosen.top_k_weight,
            mask_out_of_vocab=chosen.mask_out_of_vocab,
            step_weights=tuple(step_loss_decay**k for k in range(num_steps)),
            keep_ratio=row_keep_ratio,
            temperature=chosen.loss_temperature,
            compiled=chosen.compile,
        )

    def teacher_flops(self, labels: ChainLabels) -> int:
        """FLOPs of the teacher's logits: one product, forward only, for all steps; none for hard labels."""
        if self.settings.loss == "ce":
            return 0
        whole = self.loss_settings(1, 1.0, 1.0).needs_whole_vocabulary
        return 2 * len(labels.label) * (self.target_head if whole else self.teacher_rows).numel()

    def embed(self, ids: Tensor, like: Tensor) -> Tensor:
        """(R,) ids -> (R, D) embeddings of the target, in the dtype of `like`."""
        return nn.functional.embedding(ids, self.embed_tokens).to(like.dtype)

    def served(self, architecture: str, facts: dict[str, Any]) -> Servable:
        """What `to_serving` returns where the tensors are this module's own."""
        tensors = {**dict(self.named_parameters()), "draft_to_target_ids": self.draft_to_target_ids}
        return Servable(architecture=architecture, tensors=tensors, config=facts)
