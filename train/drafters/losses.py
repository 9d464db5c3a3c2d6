"""Distillation losses over the draft vocabulary, computed chunk by chunk from hidden states.

The teacher is the target's distribution p_{j-1} over token x_j, the student the drafter's distribution q. No tensor of
(tokens x vocabulary) ever exists: labels are taken in chunks, the teacher's part of a chunk is computed once and serves
every step that predicts these labels, and gradients with respect to hidden states and LM head are formed while the
chunk's logits are at hand (as Liger Kernel does for cross-entropy), so nothing is recomputed.

Shape letters: R = rows of a chunk, N = labels, D = hidden size, V / Vd = target / draft vocabulary, S = steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from train.drafters.rows import ChainLabels

CHUNK_ROWS = 256
"""Labels per chunk: large enough for efficient matrix products, small enough that R x Vd stays near a core's cache."""

LossKind = Literal["soft_ce", "kl", "lk_alpha", "lk_lambda"]


@dataclass(frozen=True)
class LossSettings:
    """Which loss, and its constants."""

    kind: LossKind
    lk_scale: float
    """s of lk_lambda: weight s * exp(-lk_decay * alpha) of its KL part."""
    lk_decay: float
    mask_out_of_vocab: bool
    """Leave out labels whose argmax over the whole vocabulary the drafter cannot propose (EAGLE-3's own rule)."""
    step_weights: tuple[float, ...]
    """(S,) weight of each step's loss."""
    keep_ratio: float
    """Step k is taught on this share ** k of its labels, chosen at random (`chain_labels`), and weighted up by it."""


@dataclass(frozen=True)
class Teacher:
    """Where the teacher's distributions come from."""

    hidden: Tensor
    """(rows, D) after the target's final norm, flattened."""
    lm_head: Tensor
    """(V, D)."""
    draft_head: Tensor
    """(Vd, D): the rows of lm_head that the drafter can propose."""
    draft_to_target_ids: Tensor
    """(Vd,) int64."""


@dataclass(frozen=True)
class TeacherChunk:
    """The teacher's view of R labels."""

    renormalised: Tensor
    """(R, Vd) float32: softmax restricted to the draft vocabulary."""
    entropy: Tensor
    """(R,) float32: of the renormalised distribution, in nats."""
    probs: Tensor | None
    """(R, Vd) float32: the same entries of the softmax over the whole vocabulary; None if the loss needs none."""
    best: Tensor
    """(R,) int64: the most likely draft token."""
    counts: Tensor
    """(R,) bool: False where the label is masked out of the loss."""

    def select(self, members: Tensor) -> "TeacherChunk":
        """The same of some of the labels."""
        return TeacherChunk(
            renormalised=self.renormalised.index_select(0, members),
            entropy=self.entropy[members],
            probs=None if self.probs is None else self.probs.index_select(0, members),
            best=self.best[members],
            counts=self.counts[members],
        )


def teacher_chunk(teacher: Teacher, rows: Tensor, settings: LossSettings) -> TeacherChunk:
    """Compute the teacher's distributions at flattened `rows` (R,)."""
    hidden = teacher.hidden.index_select(0, rows)
    counts = torch.ones_like(rows, dtype=torch.bool)
    mass = None
    if settings.mask_out_of_vocab or settings.kind in ("lk_alpha", "lk_lambda"):
        all_logits = torch.nn.functional.linear(hidden, teacher.lm_head).float()  # (R, V)
        logits = all_logits.index_select(1, teacher.draft_to_target_ids)
        if settings.mask_out_of_vocab:
            counts = all_logits.amax(dim=-1) <= logits.amax(dim=-1)
        mass = (logits.logsumexp(dim=-1) - all_logits.logsumexp(dim=-1)).exp()  # (R,) of the draft vocabulary
    else:
        logits = torch.nn.functional.linear(hidden, teacher.draft_head).float()
    renormalised, lse, _ = _softmax(logits)
    return TeacherChunk(
        renormalised=renormalised,
        entropy=lse - (renormalised * logits).sum(dim=-1),
        probs=None if mass is None else renormalised * mass[:, None],
        best=logits.argmax(dim=-1),
        counts=counts,
    )


def loss_and_gradient(
    draft_logits: Tensor, teacher: TeacherChunk, settings: LossSettings
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of each row and its gradient with respect to the draft logits, in closed form.

    With q = softmax(z), p~ the renormalised and p the full teacher probabilities, alpha = sum_v min(p_v, q_v):

        soft_ce    -sum p~ log q                         d/dz = q - p~
        kl         sum p~ (log p~ - log q)               d/dz = q - p~
        lk_alpha   -log alpha                            d/dz = -a / alpha,  a = d alpha/dz = q (1[q<p] - sum_{q<p} q)
        lk_lambda  w kl + (1 - w)(1 - alpha),            d/dz = w (q - p~) - (1 - w) a
                   w = min(1, s exp(-decay alpha)), held constant (LK losses, arXiv:2602.23881)

    Args:
        draft_logits: (R, Vd) float32.
        teacher: of the same rows.
        settings: which loss.

    Returns:
        (R,) losses, (R, Vd) gradients (masked rows are not zeroed here) and (R,) whether the student's most likely
        draft token is the teacher's.
    """
    target = teacher.renormalised
    q, lse, top = _softmax(draft_logits)
    matches = draft_logits.gather(1, teacher.best[:, None]).squeeze(1) == top
    soft_ce = lse - (target * draft_logits).sum(dim=-1)  # -sum p~ (z - lse); as a product autocast would round it
    if settings.kind == "soft_ce":
        return soft_ce, q.sub_(target), matches
    kl = soft_ce - teacher.entropy
    if settings.kind == "kl":
        return kl, q.sub_(target), matches
    assert teacher.probs is not None  # teacher_chunk computes them for the LK losses
    alpha = torch.minimum(teacher.probs, q).sum(dim=-1).clamp_min(torch.finfo(q.dtype).tiny)
    below = q * (q < teacher.probs)
    alpha_gradient = below - q * below.sum(dim=-1, keepdim=True)
    if settings.kind == "lk_alpha":
        return -alpha.log(), -alpha_gradient / alpha[:, None], matches
    weight = (settings.lk_scale * torch.exp(-settings.lk_decay * alpha)).clamp(max=1)
    gradient = weight[:, None] * (q - target) - (1 - weight)[:, None] * alpha_gradient
    return weight * kl + (1 - weight) * (1 - alpha), gradient, matches


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax (R, V), log-sum-exp (R,) and maximum (R,) of (R, V) logits, in passes that are cheap on a CPU, where
    `logsumexp` and `argmax` cost more than the softmax."""
    top = logits.amax(dim=-1)
    probs = logits.softmax(dim=-1)
    return probs, top - probs.amax(dim=-1).log(), top  # the largest probability is exp(top - lse), at least 1 / V


def _chunks(labels: ChainLabels) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """Cut the labels into chunks: start, end, and for each step the part of `labels.taught[step]` that lies between."""
    num_labels = len(labels.label)
    borders = torch.arange(0, num_labels + CHUNK_ROWS, CHUNK_ROWS, device=labels.label.device).clamp_max(num_labels)
    cuts = [torch.searchsorted(taught, borders).tolist() for taught in labels.taught]
    for index, (start, end) in enumerate(pairwise(borders.tolist())):
        yield start, end, [(cut[index], cut[index + 1]) for cut in cuts]


class _ChunkedDistillation(torch.autograd.Function):
    """Sum over steps and labels of step_weight * token_weight * loss; see the module's docstring."""

    @staticmethod
    def forward(
        ctx: Any,
        head: Tensor,
        teacher: Teacher,
        labels: ChainLabels,
        token_weights: Tensor,
        settings: LossSettings,
        *hidden: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_steps = len(hidden)
        compute_head = head.to(hidden[0].dtype)
        hidden_gradients = [torch.empty_like(rows) for rows in hidden]
        head_gradient = torch.zeros_like(head, dtype=torch.float32) if ctx.needs_input_grad[0] else None
        losses = torch.zeros(num_steps, dtype=torch.float32, device=head.device)
        matches = torch.zeros_like(losses)
        for start, end, parts in _chunks(labels):
            chunk = teacher_chunk(teacher, labels.label[start:end] - 1, settings)
            weights = token_weights[labels.label[start:end]] * chunk.counts  # (R,)
            for step, (first, last) in enumerate(parts):
                if first == last:
                    continue
                members = labels.taught[step][first:last] - start
                taught = chunk if len(members) == end - start else chunk.select(members)
                share = weights[members] / settings.keep_ratio**step
                student = hidden[step][first:last]
                logits = torch.nn.functional.linear(student, compute_head).float()
                loss, gradient, matched = loss_and_gradient(logits, taught, settings)
                matches[step] += (matched * share).sum()
                losses[step] += (loss * share).sum()
                # Each row's weight goes to the narrow side of the products.
                share = (share * settings.step_weights[step])[:, None]
                gradient = gradient.to(student.dtype)
                hidden_gradients[step][first:last] = (gradient @ compute_head) * share
                if head_gradient is not None:
                    head_gradient += gradient.T @ (student * share).to(student.dtype)
        ctx.save_for_backward(*hidden_gradients, *([] if head_gradient is None else [head_gradient]))
        ctx.num_steps, ctx.head_dtype = num_steps, head.dtype
        ctx.mark_non_differentiable(losses, matches)
        total = (losses * losses.new_tensor(settings.step_weights)).sum()
        return total, losses, matches

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        scale = upstream[0]
        saved = ctx.saved_tensors
        hidden_gradients = [gradient * scale.to(gradient.dtype) for gradient in saved[: ctx.num_steps]]
        head_gradient = (saved[-1] * scale).to(ctx.head_dtype) if len(saved) > ctx.num_steps else None
        return (head_gradient, None, None, None, None, *hidden_gradients)


def chunked_distillation(
    hidden: list[Tensor],
    head: Tensor,
    teacher: Teacher,
    labels: ChainLabels,
    token_weights: Tensor,
    settings: LossSettings,
) -> tuple[Tensor, Tensor, Tensor]:
    """Distil the teacher into all steps of a chain drafter.

    Args:
        hidden: S tensors (N_k, D), after the drafter's final norm; step k's output at `labels.rows(k)`.
        head: (Vd, D), the drafter's LM head.
        teacher: the target.
        labels: which rows predict which tokens.
        token_weights: (rows,) float32, each token's share in the global loss.
        settings: which loss.

    Returns:
        total loss (scalar, differentiable with respect to `hidden` and `head`), per-step losses (S,) without step
        weights, per-step top-1 agreement with the teacher (S,), weighted like the loss.
    """
    result: tuple[Tensor, Tensor, Tensor] = _ChunkedDistillation.apply(  # type: ignore[no-untyped-call]
        head, teacher, labels, token_weights, settings, *hidden
    )
    return result
