"""Causal attention within documents, block by block of rows: for training on a CPU, and the attention of training-time
test everywhere.

Rows of one document ask in blocks, over the keys up to the block's last row, and the query heads that share a key head
ask together, as more rows of one product: on a CPU faster than the flash kernel, and rows that do not ask cost nothing.
Scores are float32, or float64 for float64 inputs.

Shape letters: G = key/value heads, S = query heads that share one, H = G * S, Q = querying rows, R = all rows,
E = head dimension, q = querying rows of a block, L = keys that they may look at.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_ROWS = 128
"""Rows that ask at once: their scores stay in a core's cache, and half a block's keys are looked at in vain."""

Spans = list[tuple[int, int]]
"""[start, end) of each document in the flattened rows."""


class Scratch:
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
class Block:
    """Some querying rows of one document, and the keys up to the last of them."""

    queries: slice
    keys: slice
    future: Tensor
    """(q, F) bool: which of the block's last F keys come after each row; the others come after none."""

    def scores(self, query: Tensor, keys: Tensor, scale: float, scratch: Scratch) -> Tensor:
        """(G, S * q, L) of (G, S, Q, E) queries and (G, R, E) keys; -inf for keys after the row."""
        dtype = accumulator(query.dtype)
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


def blocks(rows: Tensor, spans: Spans) -> Iterator[Block]:
    """Cut the querying rows (Q,), ascending, of all documents into blocks; rows outside the documents are in none."""
    known = rows.tolist()
    for start, end in spans:
        first, last = bisect_left(known, start), bisect_left(known, end)
        for begin in reversed(range(first, last, BLOCK_ROWS)):  # the longest first, for the scratch memory's sake
            stop = min(begin + BLOCK_ROWS, last)
            keys = slice(start, known[stop - 1] + 1)
            late = torch.arange(known[begin], keys.stop, device=rows.device)
            yield Block(queries=slice(begin, stop), keys=keys, future=late > rows[begin:stop, None])


def attend_in_blocks(
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
    lse = query.new_zeros(query.shape[:3], dtype=accumulator(query.dtype))
    scratch = Scratch(query)
    for block in blocks(rows, spans):
        scores = block.scores(query, keys, scale, scratch)
        top = scores.amax(dim=-1)
        torch.softmax(scores, dim=-1, out=scores)
        probs = scratch.take("probs", query.dtype, scores.shape).copy_(scores)
        block.put(out, probs @ values[:, block.keys])
        block.put(lse, top - scores.amax(dim=-1).log())  # the largest probability is exp(top - lse)
    return out, lse


def by_key_head(query: Tensor, num_key_heads: int) -> Tensor:
    """(H, Q, E) -> (G, S, Q, E)."""
    return query.reshape(num_key_heads, len(query) // num_key_heads, *query.shape[1:])


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Softmax statistics are kept in float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32
