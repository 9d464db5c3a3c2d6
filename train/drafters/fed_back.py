"""Decoding of serial drafters that read their own output back: one layer over [token; state] (the EAGLE family, MTP).

A row reads the state before it (the target's features where they are known, else the drafter's own output) and a token;
its output is the state of the next row and gives the logits of the token after. A family says what its layer is; the
keys and values of B sequences, trees included, are kept here.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from data.attention import grouped_attention
from data.batch import TargetFeatures
from data.cache import KVBuffer, Slots, slots_after, step_mask, tree_mask
from train.drafters.base import DraftState
from train.drafters.eagle_layer import Attend
from train.drafters.serial import SerialDrafter


@dataclass
class FedBackState(DraftState):
    """Decoding state of B sequences."""

    kv: KVBuffer
    """Keys and values of the committed rows, then of the rows that a proposal simulated."""
    lengths: Tensor
    """(B,) int64, committed rows."""
    hidden: Tensor | None = None
    """(B, D): output at the last committed row."""
    simulated: Tensor | None = None
    """(B, 1 + nodes, D): `hidden`, then the outputs of the nodes that the proposal has read."""
    ancestors: Tensor | None = None
    """(B, 1 + nodes, nodes) bool: which nodes each of these rows sees."""

    def keep(self, sequences: Tensor) -> None:
        """See DraftState.keep."""
        self.kv.keep(sequences)
        self.lengths = self.lengths[sequences]
        self.hidden = None if self.hidden is None else self.hidden[sequences]


class FedBackDrafter(SerialDrafter):
    """A serial drafter whose layer reads its own output back."""

    @abstractmethod
    def _fuse(self, features: TargetFeatures) -> Tensor:
        """Features (B, M, ...) -> (B * M, D), the state that the layer reads."""

    @abstractmethod
    def _layer(self, ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """(R,) token ids, (R, D) states, (R,) positions -> (R, D) output stream."""

    @abstractmethod
    def _fed_back(self, stream: Tensor) -> Tensor:
        """(..., D) output stream -> what the next row reads of it."""

    @abstractmethod
    def _logits(self, stream: Tensor) -> Tensor:
        """(..., D) output stream -> (..., Vd)."""

    def start(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> FedBackState:
        """An empty state; see Proposer.start."""
        lengths = torch.zeros(len(prompts), dtype=torch.int64, device=self.draft_to_target_ids.device)
        return FedBackState(kv=KVBuffer(max_tokens), lengths=lengths)

    def observe(self, state: FedBackState, features: TargetFeatures, next_ids: Tensor, counts: Tensor) -> None:
        """Compute the committed rows from the target's true features; see Proposer.observe."""
        batch, num_rows = next_ids.shape
        slots = slots_after(state.lengths, num_rows, state.kv.capacity)
        mask = step_mask(state.lengths, num_rows, slots.end)
        fused = self._fuse(features).view(batch, num_rows, -1)
        outputs = self._decode_rows(state, fused, next_ids, slots.index, slots, mask)
        state.hidden = outputs[torch.arange(batch, device=counts.device), counts - 1]
        state.lengths = state.lengths + counts

    def first_logits(self, state: FedBackState) -> Tensor:
        """(B, Vd); see SerialDrafter.first_logits."""
        if state.hidden is None:
            raise ValueError("propose() needs a committed row to draft from: call observe() first")
        state.simulated = state.hidden[:, None]
        state.ancestors = torch.zeros(len(state.hidden), 1, 0, dtype=torch.bool, device=state.hidden.device)
        return self._logits(state.hidden)

    def extend(self, state: FedBackState, tokens: Tensor, parents: Tensor, depth: int) -> Tensor:
        """(B, W, Vd); see SerialDrafter.extend."""
        assert state.simulated is not None and state.ancestors is not None  # first_logits came before
        batch, width = tokens.shape
        sequences = torch.arange(batch, device=tokens.device)[:, None]
        above = parents + 1  # row 0 is the committed text
        num_simulated = state.simulated.shape[1] - 1
        # Each new row sees what its parent's row sees, and itself.
        inherited = state.ancestors[sequences, above]  # (B, W, simulated)
        own = torch.eye(width, dtype=torch.bool, device=tokens.device).expand(batch, -1, -1)
        visible = torch.cat([inherited, own], dim=-1)
        slots = slots_after(state.lengths + num_simulated, width, state.kv.capacity)
        mask = tree_mask(state.lengths, visible, slots.end)
        positions = (state.lengths - 1 + depth)[:, None].expand(-1, width)
        hidden = self._fed_back(state.simulated[sequences, above])
        outputs = self._decode_rows(state, hidden, tokens, positions, slots, mask)
        state.simulated = torch.cat([state.simulated, outputs], dim=1)
        padded = torch.nn.functional.pad(state.ancestors, (0, width))
        state.ancestors = torch.cat([padded, visible], dim=1)
        return self._logits(outputs)

    def _decode_rows(
        self, state: FedBackState, hidden: Tensor, next_ids: Tensor, positions: Tensor, slots: Slots, mask: Tensor
    ) -> Tensor:
        """Run the layer on rows (B, M, D) and leave their keys and values at `slots`; returns their output streams."""
        batch, num_rows = next_ids.shape

        def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            query, keys, values = (
                part.reshape(len(part), batch, num_rows, -1).transpose(0, 1) for part in (query, keys, values)
            )
            stored = state.kv.write(keys, values, slots)
            mixed = grouped_attention(query, *stored, mask)
            return mixed.transpose(0, 1).flatten(1, 2)  # (H, B * M, E)

        output = self._layer(next_ids.flatten(), hidden.flatten(0, 1), positions.flatten(), attend)
        return output.view(batch, num_rows, -1)
