"""Distillation over the draft vocabulary, computed chunk by chunk from hidden states.

The teacher is the target's distribution p_{j-1} over token x_j, the student the drafter's distribution q. No tensor of
(tokens x vocabulary) ever exists: labels are taken in chunks, the teacher's part of a chunk is computed once and serves
every step that predicts these labels, and gradients with respect to hidden states and LM head are formed while the
chunk's logits are at hand (as Liger Kernel does for cross-entropy), so nothing is recomputed. The gradient takes the
logits' own memory.

Shape letters: R = rows of a chunk, N = labels, D = hidden size, V / Vd = target / draft vocabulary, S = steps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from train.drafters.losses import LossSettings, TeacherChunk, loss_and_gradient, softmax
from train.drafters.rows import ChainLabels

CHUNK_ROWS = 256
"""Labels per chunk: large enough for efficient matrix products."""
CPU_BLOCK_ROWS = 32
"""On a CPU the formulas take so many rows at once: a block of logits stays in a core's cache from pass to pass."""


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
    token_ids: Tensor
    """(rows,) int64, each row's own token as an index into the draft vocabulary, -1 if it is not in it: for `ce`."""


def teacher_chunk(teacher: Teacher, rows: Tensor, settings: LossSettings) -> TeacherChunk:
    """Compute the teacher's distributions at flattened `rows` (R,), for the tokens at `rows` + 1."""
    if settings.kind == "ce":
        return _hard_labels(teacher.token_ids[rows + 1])
    whole = settings.needs_whole_vocabulary
    hidden = teacher.hidden.index_select(0, rows)
    all_logits = torch.nn.functional.linear(hidden, teacher.lm_head if whole else teacher.draft_head)
    if settings.temperature != 1:
        all_logits = all_logits / settings.temperature
    logits = all_logits.index_select(1, teacher.draft_to_target_ids) if whole else all_logits
    found = TeacherChunk(
        renormalised=torch.empty_like(logits, dtype=torch.float32),
        logits=logits,
        lse=hidden.new_empty(len(rows), dtype=torch.float32),
        mass=hidden.new_empty(len(rows), dtype=torch.float32) if whole else None,
        best=torch.empty_like(rows),
        counts=torch.ones_like(rows, dtype=torch.bool),
    )
    for block in _blocks(len(rows), rows.device):
        known = logits[block].float()
        found.renormalised[block], lse, top = softmax(known)
        found.lse[block] = lse
        found.best[block] = known.argmax(dim=-1)
        if found.mass is not None:
            found.mass[block] = _mass(all_logits[block].float(), found.renormalised[block], top)
        if settings.mask_out_of_vocab:
            found.counts[block] = all_logits[block].amax(dim=-1) <= top
    return found


def _mass(all_logits: Tensor, renormalised: Tensor, top: Tensor) -> Tensor:
    """(R,) share of the draft vocabulary in the softmax of (R, V) logits, given the softmax over it alone and its top
    logit. A difference of two log-sum-exps would lose digits where the logits are large."""
    highest = all_logits.amax(dim=-1)
    relative = (top - highest).exp() / renormalised.amax(dim=-1)
    return relative / (all_logits - highest[:, None]).exp().sum(dim=-1)


def _hard_labels(token_ids: Tensor) -> TeacherChunk:
    """The text itself as the teacher: it takes no product."""
    nothing = torch.empty(len(token_ids), 0, device=token_ids.device)
    return TeacherChunk(
        renormalised=nothing,
        logits=nothing,
        lse=nothing.new_empty(len(token_ids)),
        mass=None,
        best=token_ids.clamp_min(0),
        counts=token_ids >= 0,
    )


def _blocks(rows: int, device: torch.device) -> Iterator[slice]:
    """Cut the rows of a chunk into what the formulas take at once."""
    size = CPU_BLOCK_ROWS if device.type == "cpu" else max(rows, 1)
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def _chunks(labels: ChainLabels) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """Cut the labels into chunks: start, end, and for each step the part of `labels.taught[step]` that lies between."""
    num_labels = len(labels.label)
    borders = torch.arange(0, num_labels + CHUNK_ROWS, CHUNK_ROWS, device=labels.label.device).clamp_max(num_labels)
    cuts = [torch.searchsorted(taught, borders).tolist() for taught in labels.taught]
    for index, (start, end) in enumerate(pairwise(borders.tolist())):
        yield start, end, [(cut[index], cut[index + 1]) for cut in cuts]


@cache
def _compiled_formulas() -> Any:
    return torch.compile(loss_and_gradient, dynamic=True)


def _replace_by_gradient(
    logits: Tensor, members: Tensor, teacher: TeacherChunk, settings: LossSettings
) -> tuple[Tensor, Tensor]:
    """Turn draft logits (N, Vd) of some labels (N,) of a chunk into their gradient, in place.

    Returns:
        (N,) float32 losses, (N,) float32 matches.
    """
    formulas = _compiled_formulas() if settings.compiled else loss_and_gradient
    losses = logits.new_empty(len(logits), dtype=torch.float32)
    matches = torch.empty_like(losses)
    for block in _blocks(len(logits), logits.device):
        part = teacher.select(members[block])
        losses[block], gradient, matches[block] = formulas(logits[block].float(), part, settings)
        logits[block] = gradient
    return losses, matches


class _ChunkedDistillation(torch.autograd.Function):
    """Sum over steps and labels of step_weight * token_weight * loss; see the module's docstring."""

    @staticmethod
    def forward(
        ctx: Any,
        teacher: Teacher,
        labels: ChainLabels,
        token_weights: Tensor,
        settings: LossSettings,
        num_steps: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        hidden, heads = tensors[:num_steps], tensors[num_steps:]
        compute_heads = [head.to(hidden[0].dtype) for head in heads]
        hidden_gradients = [torch.empty_like(rows) for rows in hidden]
        head_gradients = [
            torch.zeros_like(head, dtype=torch.float32) if needed else None
            for head, needed in zip(heads, ctx.needs_input_grad[5 + num_steps :], strict=True)
        ]
        losses = torch.zeros(num_steps, dtype=torch.float32, device=token_weights.device)
        matches = torch.zeros_like(losses)
        for start, end, parts in _chunks(labels):
            chunk = teacher_chunk(teacher, labels.label[start:end] - 1, settings)
            weights = token_weights[labels.label[start:end]] * chunk.counts  # (R,)
            for step, (first, last) in enumerate(parts):
                if first == last:
                    continue
                which = min(step, len(heads) - 1)
                members = labels.taught[step][first:last] - start
                student = hidden[step][first:last]
                logits = torch.nn.functional.linear(student, compute_heads[which])
                loss, matched = _replace_by_gradient(logits, members, chunk, settings)
                share = weights[members] / settings.keep_ratio**step
                matches[step] += (matched * share).sum()
                losses[step] += (loss * share).sum()
                # Each row's weight goes to the narrow side of the products.
                share = (share * settings.step_weights[step])[:, None]
                hidden_gradients[step][first:last] = (logits @ compute_heads[which]) * share
                head_gradient = head_gradients[which]
                if head_gradient is not None:
                    head_gradient += logits.T @ (student * share).to(student.dtype)
        ctx.save_for_backward(*hidden_gradients, *head_gradients)
        ctx.num_steps, ctx.head_dtypes = num_steps, [head.dtype for head in heads]
        ctx.mark_non_differentiable(losses, matches)
        total = (losses * losses.new_tensor(settings.step_weights)).sum()
        return total, losses, matches

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        scale = upstream[0]
        hidden_gradients, head_gradients = ctx.saved_tensors[: ctx.num_steps], ctx.saved_tensors[ctx.num_steps :]
        return (
            *[None] * 5,
            *(gradient * scale.to(gradient.dtype) for gradient in hidden_gradients),
            *(
                None if gradient is None else (gradient * scale).to(dtype)
                for gradient, dtype in zip(head_gradients, ctx.head_dtypes, strict=True)
            ),
        )


def chunked_distillation(
    hidden: Sequence[Tensor],
    heads: Sequence[Tensor],
    teacher: Teacher,
    labels: ChainLabels,
    token_weights: Tensor,
    settings: LossSettings,
) -> tuple[Tensor, Tensor, Tensor]:
    """Distil the teacher into all steps of a chain drafter.

    Args:
        hidden: S tensors (N_k, D), what the LM head reads; step k's output at `labels.rows(k)`.
        heads: (Vd, D), the drafter's LM head: one for all steps, or S of them.
        teacher: the target.
        labels: which rows predict which tokens.
        token_weights: (rows,) float32, each token's share in the global loss.
        settings: which loss.

    Returns:
        total loss (scalar, differentiable with respect to `hidden` and `heads`), per-step losses (S,) without step
        weights, per-step top-1 agreement with the teacher (S,), weighted like the loss.
    """
    assert len(heads) in (1, len(hidden))
    result: tuple[Tensor, Tensor, Tensor] = _ChunkedDistillation.apply(  # type: ignore[no-untyped-call]
        teacher, labels, token_weights, settings, len(hidden), *hidden, *heads
    )
    return result
