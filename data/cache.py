"""Key/value caches for sequences of different length that draft, verify and forget at their own pace.

Buffers have a fixed capacity. Rows are written after the committed part of each sequence, and count only once they are
committed: what was not is overwritten by the next write. So forgetting costs nothing, and no cache is ever copied.

Shape letters: B = sequences, G = key/value heads, E = head dimension, M = rows of one step, N = nodes of a tree,
L = longest sequence in the buffer.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from data.recurrent import Passage, RunningState


class KVBuffer:
    """Keys and values of B sequences."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._buffers: tuple[Tensor, Tensor] | None = None  # (B, capacity, G, E): rows are contiguous

    def write(self, keys: Tensor, values: Tensor, slots: "Slots") -> tuple[Tensor, Tensor]:
        """Put (B, G, M, E) keys and values at `slots`; returns all up to the longest sequence, (B, G, L, E) each.

        Keys and values may differ in G and E (latents).
        """
        if self._buffers is None:
            made = [part.new_zeros(len(part), self.capacity, part.shape[1], part.shape[3]) for part in (keys, values)]
            self._buffers = made[0], made[1]
        for buffer, rows in zip(self._buffers, (keys, values), strict=True):
            if slots.start is None:
                buffer[slots.batch, slots.index] = rows.transpose(1, 2)
            else:
                buffer[:, slots.start : slots.start + rows.shape[2]] = rows.transpose(1, 2)
        stored_keys, stored_values = self._buffers
        return stored_keys[:, : slots.end].transpose(1, 2), stored_values[:, : slots.end].transpose(1, 2)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy rows `source` (B, N) to `target` (B, N), all slots."""
        assert self._buffers is not None  # there is something to move only after a write
        batch = torch.arange(len(source), device=source.device)[:, None]
        for buffer in self._buffers:
            buffer[batch, target] = buffer[batch, source]

    def keep(self, sequences: Tensor) -> None:
        """Forget all but the given sequences (B',)."""
        if self._buffers is not None:
            keys, values = self._buffers
            self._buffers = keys[sequences], values[sequences]


@dataclass(frozen=True)
class Slots:
    """Where the rows of one step go."""

    batch: Tensor
    """(B, 1) int64."""
    index: Tensor
    """(B, M) int64."""
    start: int | None
    """The first slot, where it is the same in all sequences."""
    end: int
    """One past the last slot in use."""


def slots_after(lengths: Tensor, num_rows: int, capacity: int, static: bool = False) -> Slots:
    """Slots for M rows after the first `lengths` (B,) of each sequence.

    Args:
        lengths: committed rows, int64.
        num_rows: M.
        capacity: of the buffer.
        static: let steps read the whole buffer, so that all have one shape (compiled graphs).

    Raises:
        ValueError: if the buffer is too small.
    """
    low, high = int(lengths.min()), int(lengths.max())
    if high + num_rows > capacity:
        raise ValueError(f"the cache holds {capacity} tokens, {high + num_rows} are needed: start with more max_tokens")
    return Slots(
        batch=torch.arange(len(lengths), device=lengths.device)[:, None],
        index=lengths[:, None] + torch.arange(num_rows, device=lengths.device),
        start=low if low == high else None,
        end=capacity if static else high + num_rows,
    )


class TargetCache(Cache):  # type: ignore[misc]
    """The target's cache, as transformers' models use one: one buffer per layer, and the lengths of the sequences."""

    def __init__(self, batch_size: int, capacity: int, device: torch.device, static: bool = False) -> None:
        """Make an empty cache.

        Args:
            batch_size: B.
            capacity: tokens per sequence, drafts under verification included.
            device: of the target.
            static: see `slots_after`.
        """
        super().__init__(layers=[])
        self.capacity, self.static = capacity, static
        self.lengths = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self._buffers: dict[int, KVBuffer] = {}
        self._states: dict[int, RunningState] = {}
        self._slots: Slots | None = None
        self._positions: Tensor | None = None  # (B, capacity) int64, of the tokens in slots after the committed ones

    def begin(self, num_rows: int, written: int = 0) -> Slots:
        """Announce a step of M rows; the model's `update` calls follow. `written` rows of earlier steps after the
        committed ones stay."""
        self._slots = slots_after(self.lengths + written, num_rows, self.capacity, self.static)
        return self._slots

    def distances(self, positions: Tensor, slots: Slots) -> Tensor:
        """For sliding windows, in every step: how many positions each slot's token lies before each row's.

        Args:
            positions: (B, M) int64, of the rows of the step.
            slots: where these rows go.

        Returns:
            (B, 1, M, L) int64.
        """
        if self._positions is None:
            self._positions = self.lengths.new_zeros(len(self.lengths), self.capacity)
        self._positions[slots.batch, slots.index] = positions
        number = torch.arange(slots.end, device=positions.device)  # a committed token's position is its slot's number
        keys = torch.where(number < self.lengths[:, None], number, self._positions[:, : slots.end])
        return (positions[:, :, None] - keys[:, None])[:, None]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *unused: Any, **also_unused: Any
    ) -> tuple[Tensor, Tensor]:
        """Store one layer's rows of the announced step; see `KVBuffer.write`."""
        assert self._slots is not None  # Target.step announces
        buffer = self._buffers.setdefault(layer_idx, KVBuffer(self.capacity))
        return buffer.write(key_states, value_states, self._slots)

    def enter(self, layer_idx: int, mixer: nn.Module, rows: Tensor) -> Passage:
        """(B, M, D) hidden states of the announced step enter a layer with a running state; returns its cache."""
        return self._states.setdefault(layer_idx, RunningState(mixer)).enter(rows)

    def commit(self, counts: Tensor) -> None:
        """The first `counts` (B,) rows of the last step belong to the text."""
        self.lengths = self.lengths + counts
        for state in self._states.values():
            state.commit(counts)

    def fork(self) -> "TargetCache":
        """The same keys and values for who runs ahead of the text: what it writes after the committed rows is
        overwritten by the next step of either."""
        ahead = TargetCache(0, self.capacity, self.lengths.device, self.static)
        ahead.lengths, ahead._buffers = self.lengths, self._buffers
        return ahead

    def commit_path(self, path: Tensor, counts: Tensor) -> None:
        """As `commit`, for a tree: row 0 and the nodes' rows `path` (B, N) (padded arbitrarily) in this order."""
        source = self.lengths[:, None] + path
        target = self.lengths[:, None] + torch.arange(path.shape[1], device=path.device)
        for buffer in self._buffers.values():
            buffer.move(source, target)
        self.commit(counts)

    def keep(self, sequences: Tensor) -> None:
        """Forget all but the given sequences (B',)."""
        self.lengths = self.lengths[sequences]
        self._positions = None if self._positions is None else self._positions[sequences]
        for buffer in self._buffers.values():
            buffer.keep(sequences)
        for state in self._states.values():
            state.keep(sequences)


def step_mask(lengths: Tensor, num_rows: int, end: int) -> Tensor:
    """Which slots the rows of a step may look at: everything before them, and themselves.

    Args:
        lengths: (B,) committed rows.
        num_rows: M.
        end: L.

    Returns:
        (B, 1, M, L) bool.
    """
    last = lengths[:, None] + torch.arange(num_rows, device=lengths.device)  # (B, M)
    return (torch.arange(end, device=lengths.device) <= last[..., None])[:, None]


def tree_mask(lengths: Tensor, visible: Tensor, end: int) -> Tensor:
    """The same for the nodes of a tree, whose slots follow the committed ones.

    Args:
        lengths: (B,) committed rows.
        visible: (B, M, N) bool: which of the first N slots after them each row may look at.
        end: L.

    Returns:
        (B, 1, M, L) bool.
    """
    offset = torch.arange(end, device=lengths.device) - lengths[:, None]  # (B, L)
    nodes = visible.shape[2]
    index = offset.clamp(0, max(nodes - 1, 0))[:, None].expand(-1, visible.shape[1], -1)
    within = ((offset >= 0) & (offset < nodes))[:, None]
    return ((offset < 0)[:, None] | (within & visible.gather(2, index)))[:, None]
