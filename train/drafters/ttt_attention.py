"""The attention of training-time test, block by block.

Attention of step k (EAGLE-3, arXiv:2503.01840, section 3): row t attends to the step-0 keys of rows <= t in its
document and to its own keys of steps 1..k. That is one causal block plus k diagonals. Softmax over the union is exact
without ever forming a (rows, steps * rows) matrix: the causal part is computed block by block with its log-sum-exp,
each diagonal is one dot product per row, and the parts are merged by their log-sum-exps.

Shape letters: G = key/value heads, S = query heads that share one, H = G * S, Q = querying rows, R = all rows,
E = head dimension, k = earlier draft steps.
"""

from typing import Any

import torch
from torch import Tensor

from data.blocked_attention import Scratch, Spans, accumulator, attend_in_blocks, blocks, by_key_head


def ttt_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    own_keys: list[Tensor],
    own_values: list[Tensor],
    rows: Tensor,
    spans: Spans,
) -> Tensor:
    """Attention of one training-time-test step.

    Args:
        query: (H, Q, E), rotated, of this step. H is a multiple of G.
        keys: (G, R, E), rotated, of step 0.
        values: (G, R, E), of step 0.
        own_keys: keys (G, Q, E) of steps 1..k of the querying rows, this step last; empty at step 0.
        own_values: their values.
        rows: (Q,) int64 ascending, the querying rows.
        spans: the documents; rows outside all of them get zeros, or their own values.

    Returns:
        (H, Q, E).
    """
    attended: Tensor = _BlockedTTT.apply(  # type: ignore[no-untyped-call]
        query, keys, values, rows, spans, *own_keys, *own_values
    )
    return attended


class _BlockedTTT(torch.autograd.Function):
    """Exact merged attention, block by block; see the module's docstring.

    The forward pass is `attend_in_blocks`, merged with the diagonals. The backward pass makes the scores anew; it
    needs only P = exp(score - lse) and D = sum(grad * out), with the log-sum-exp over keys and diagonals
    (FlashAttention-2, arXiv:2307.08691, algorithm 2).
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, keys: Tensor, values: Tensor, rows: Tensor, spans: Spans, *diagonals: Tensor
    ) -> Tensor:
        scale = query.shape[-1] ** -0.5
        query = by_key_head(query, len(keys))
        out, lse = attend_in_blocks(query, keys, values, rows, spans, scale)
        num_steps = len(diagonals) // 2
        if num_steps:
            scores_of_own = [_dot(query, key[:, None]) * scale for key in diagonals[:num_steps]]
            merged = torch.stack([lse, *scores_of_own]).logsumexp(dim=0)
            out *= (lse - merged).exp().to(out.dtype)[..., None]
            for score, value in zip(scores_of_own, diagonals[num_steps:], strict=True):
                out += (score - merged).exp().to(out.dtype)[..., None] * value[:, None]
            lse = merged
        ctx.save_for_backward(query, keys, values, rows, out, lse, *diagonals)
        ctx.spans, ctx.scale = spans, scale
        return out.flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, rows, out, lse, *diagonals = ctx.saved_tensors
        grad = by_key_head(gradients[0], len(keys))
        total = _dot(grad, out)  # D
        grad_query, grad_keys, grad_values = (torch.zeros_like(tensor) for tensor in (query, keys, values))
        scratch = Scratch(query)
        for block in blocks(rows, ctx.spans):
            scores = block.scores(query, keys, ctx.scale, scratch)
            scores = scores.sub_(block.take(lse)[..., None]).exp_()
            probs = scratch.take("probs", query.dtype, scores.shape).copy_(scores)
            grad_out = block.take(grad)
            grad_values[:, block.keys] += probs.mT @ grad_out
            grad_scores = scratch.take("gradients", query.dtype, scores.shape)
            torch.bmm(grad_out, values[:, block.keys].mT, out=grad_scores)
            grad_scores.sub_(block.take(total).to(query.dtype)[..., None]).mul_(probs)
            block.put(grad_query, grad_scores @ keys[:, block.keys])
            grad_keys[:, block.keys] += grad_scores.mT @ block.take(query)
        grad_query, grad_keys = grad_query.mul_(ctx.scale), grad_keys.mul_(ctx.scale)
        num_steps = len(diagonals) // 2
        key_gradients: list[Tensor] = []
        value_gradients: list[Tensor] = []
        for key, value in zip(diagonals[:num_steps], diagonals[num_steps:], strict=True):
            probability = (_dot(query, key[:, None]) * ctx.scale - lse).exp()
            score_gradient = probability * (_dot(grad, value[:, None]) - total) * ctx.scale
            score_gradient = score_gradient.to(query.dtype)[..., None]
            grad_query += score_gradient * key[:, None]
            key_gradients.append((score_gradient * query).sum(dim=1))
            value_gradients.append((probability.to(query.dtype)[..., None] * grad).sum(dim=1))
        return (grad_query.flatten(0, 1), grad_keys, grad_values, None, None, *key_gradients, *value_gradients)


def _dot(left: Tensor, right: Tensor) -> Tensor:
    """(..., E) x (..., E) -> (...) row-wise dot products."""
    return (left * right).sum(-1, dtype=accumulator(left.dtype))


class TTTAttend:
    """Attention of an unrolled chain: step 0 leaves its keys and values for all later steps, which add their own."""

    def __init__(self, spans: Spans, rows: Tensor) -> None:
        self.spans, self.rows = spans, rows
        self.shared: tuple[Tensor, Tensor] | None = None
        self.own_keys: list[Tensor] = []
        self.own_values: list[Tensor] = []

    def narrow(self, rows: Tensor, kept: Tensor) -> None:
        """Go on with `rows`, the entries `kept` of those so far."""
        self.rows = rows
        self.own_keys = [keys.index_select(1, kept) for keys in self.own_keys]
        self.own_values = [values.index_select(1, kept) for values in self.own_values]

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # blocks follow the documents: nothing to trace
    def __call__(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See `train.drafters.draft_layer.Attend`; the first call is step 0's."""
        if self.shared is None:
            self.shared = keys, values
        else:
            self.own_keys.append(keys)
            self.own_values.append(values)
        return ttt_attention(query, *self.shared, self.own_keys, self.own_values, self.rows, self.spans)
