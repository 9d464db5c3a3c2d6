"""The attention of training-time test, block by block.

Attention of step k (EAGLE-3, arXiv:2503.01840, section 3): row t attends to the step-0 keys of rows <= t in its
document and to its own keys of steps 1..k. That is one causal block plus k diagonals. Softmax over the union is exact
without ever forming a (rows, steps * rows) matrix: the causal part is computed block by block with its log-sum-exp,
each diagonal is one dot product per row, and the parts are merged by their log-sum-exps.

Rows of one document ask in blocks, over the keys up to the block's last row, and the query heads that share a key head
ask together, as more rows of one product: on a CPU faster than the flash kernel, and rows that do not ask cost nothing.
Scores are float32, or float64 for float64 inputs.

Shape letters: G = key/value heads, S = query heads that share one, H = G * S, Q = querying rows, R = all rows,
E = head dimension, q = querying rows of a block, L = keys that they may look at, k = earlier draft steps.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BLOCK_ROWS = 128
"""Rows that ask at once: their scores stay in a core's cache, and half a block's keys are looked at in vain."""

Spans = list[tuple[int, int]]
"""[start, end) of each document in the flattened rows."""


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

    The forward pass is `_attend_in_blocks`, merged with the diagonals. The backward pass makes the scores anew; it
    needs only P = exp(score - lse) and D = sum(grad * out), with the log-sum-exp over keys and diagonals
    (FlashAttention-2, arXiv:2307.08691, algorithm 2).
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, keys: Tensor, values: Tensor, rows: Tensor, spans: Spans, *diagonals: Tensor
    ) -> Tensor:
        scale = query.shape[-1] ** -0.5
        query = _by_key_head(query, len(keys))
        out, lse = _attend_in_blocks(query, keys, values, rows, spans, scale)
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
        grad = _by_key_head(gradients[0], len(keys))
        total = _dot(grad, out)  # D
        grad_query, grad_keys, grad_values = (torch.zeros_like(tensor) for tensor in (query, keys, values))
        scratch = _Scratch(query)
        for block in _blocks(rows, ctx.spans):
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


class _Scratch:
    """Memory that one block after the other writes its scores to: on a CPU, fresh pages for each would take as long as
    the product."""

    def __init__(self, like: Tensor) -> None:
        self._device = like.device
        self._held: dict[str, Tensor] = {}

    def take(self, purpose: str, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        """A tensor of `shape` with arbitrary content; the same memory for the same purpose."""
        held = self._held.get(purpose)
        if held is None or len(held) < shape.numel():
            self._held[purpose] = held = torch.empty(shape.numel(), dtype=dtype, device=self._device)
        return held[: shape.numel()].view(shape)


@dataclass(frozen=True)
class _Block:
    """Some querying rows of one document, and the keys up to the last of them."""

    queries: slice
    keys: slice
    future: Tensor
    """(q, F) bool: which of the block's last F keys come after each row; the others come after none."""

    def scores(self, query: Tensor, keys: Tensor, scale: float, scratch: "_Scratch") -> Tensor:
        """(G, S * q, L) of (G, S, Q, E) queries and (G, R, E) keys; -inf for keys after the row."""
        dtype = _accumulator(query.dtype)
        asking, asked = self.take(query).to(dtype) * scale, keys[:, self.keys].to(dtype).mT
        scores = scratch.take("scores", dtype, torch.Size((*asking.shape[:2], asked.shape[2])))
        torch.bmm(asking, asked, out=scores)
        late = scores.view(*query.shape[:2], len(self.future), -1)[..., -self.future.shape[1] :]
        late.masked_fill_(self.future, float("-inf"))
        return scores

    def take(self, tensor: Tensor) -> Tensor:
        """(G, S, Q, ...) -> (G, S * q, ...)."""
        return tensor[:, :, self.queries].flatten(1, 2)

    def put(self, tensor: Tensor, part: Tensor) -> None:
        """Write (G, S * q, ...) to this block's rows of (G, S, Q, ...)."""
        rows = tensor[:, :, self.queries]
        rows.copy_(part.view(rows.shape))


def _blocks(rows: Tensor, spans: Spans) -> Iterator[_Block]:
    """Cut the querying rows (Q,), ascending, of all documents into blocks; rows outside the documents are in none."""
    known = rows.tolist()
    for start, end in spans:
        first, last = bisect_left(known, start), bisect_left(known, end)
        for begin in reversed(range(first, last, BLOCK_ROWS)):  # the longest first, for the scratch memory's sake
            stop = min(begin + BLOCK_ROWS, last)
            keys = slice(start, known[stop - 1] + 1)
            late = torch.arange(known[begin], keys.stop, device=rows.device)
            yield _Block(queries=slice(begin, stop), keys=keys, future=late > rows[begin:stop, None])


def _attend_in_blocks(
    query: Tensor, keys: Tensor, values: Tensor, rows: Tensor, spans: Spans, scale: float
) -> tuple[Tensor, Tensor]:
    """Causal attention within documents.

    Args:
        query: (G, S, Q, E).
        keys: (G, R, E).
        values: (G, R, E).
        rows: (Q,) int64 ascending, the querying rows.
        spans: the documents; rows outside all of them get zeros.
        scale: of the scores.

    Returns:
        output (G, S, Q, E), and log-sum-exp of the scores (G, S, Q) in the accumulator's dtype.
    """
    out = torch.zeros_like(query)
    lse = query.new_zeros(query.shape[:3], dtype=_accumulator(query.dtype))
    scratch = _Scratch(query)
    for block in _blocks(rows, spans):
        scores = block.scores(query, keys, scale, scratch)
        top = scores.amax(dim=-1)
        torch.softmax(scores, dim=-1, out=scores)
        probs = scratch.take("probs", query.dtype, scores.shape).copy_(scores)
        block.put(out, probs @ values[:, block.keys])
        block.put(lse, top - scores.amax(dim=-1).log())  # the largest probability is exp(top - lse)
    return out, lse


def _by_key_head(query: Tensor, num_key_heads: int) -> Tensor:
    """(H, Q, E) -> (G, S, Q, E)."""
    return query.reshape(num_key_heads, len(query) // num_key_heads, *query.shape[1:])


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    """Softmax statistics are kept in float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _dot(left: Tensor, right: Tensor) -> Tensor:
    """(..., E) x (..., E) -> (...) row-wise dot products."""
    return (left * right).sum(-1, dtype=_accumulator(left.dtype))
