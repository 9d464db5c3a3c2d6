"""Serial drafters that read their own output back: one layer over [token; state] (the EAGLE family, MTP).

A row reads the state before it (the target's features where they are known, else the drafter's own output) and a token;
its output is the state of the next row and gives the logits of the token after. A family says what its layer is;
training-time test and decoding, with the keys and values of B sequences, trees included, are the same for all.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from pydantic import Field
from torch import Tensor

from conf import config
from data.attention import grouped_attention
from data.batch import Batch, TargetFeatures, last_rows
from data.cache import KVBuffer, Slots, slots_after, step_mask, tree_mask
from train.drafters.base import DraftLoss, DraftState
from train.drafters.distilled import DistilledDrafter, SteppedConfig
from train.drafters.draft_layer import Attend
from train.drafters.flops import product_flops
from train.drafters.rows import ChainLabels, chain_labels, shifted_ids
from train.drafters.serial import Ancestry
from train.drafters.ttt_attention import TTTAttend


@config
class FedBackConfig(SteppedConfig):
    """What their yamls have in common."""

    ttt_steps: int = Field(ge=1)
    """Training-time-test steps S: how often the layer reads its own output in training."""
    earlier_state_ratio: float = Field(ge=0, le=1)
    """Training: share of the rows that, from the third step on, read a state which the layer has computed one or more
    steps earlier for the same place in the text, instead of the last step's (MTP-Boosting)."""


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
    ancestry: Ancestry | None = None
    """Of these nodes."""

    def keep(self, sequences: Tensor) -> None:
        """See DraftState.keep."""
        self.kv.keep(sequences)
        self.lengths = self.lengths[sequences]
        self.hidden = None if self.hidden is None else self.hidden[sequences]


class FedBackDrafter(DistilledDrafter):
    """A serial drafter whose layer reads its own output back."""

    settings: FedBackConfig

    def fuse(self, features: TargetFeatures) -> Tensor:
        """Features (B, M, ...) -> (B * M, D), the state that the layer reads: the last one, unless a family differs."""
        return self.last_hidden(features)

    @abstractmethod
    def layer(
        self, ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, queries: Tensor | None = None
    ) -> Tensor:
        """(R,) token ids, (R, D) states, (R,) positions -> (Q, D) output stream of the rows `queries` (all of them)."""

    @abstractmethod
    def fed_back(self, stream: Tensor) -> Tensor:
        """(..., D) output stream -> what the next row reads of it."""

    @abstractmethod
    def normed(self, stream: Tensor) -> Tensor:
        """(..., D) output stream -> what the LM head reads of it."""

    @abstractmethod
    def layer_flops(self, everywhere: int, key_rows: int, query_rows: int, pairs: int) -> int:
        """Training FLOPs of `fuse` on `everywhere` rows and of the layer: `query_rows` outputs over `key_rows` keys and
        values, `pairs` of them looked at."""

    # --- training ----------------------------------------------------------------------------------------------------

    def loss(self, batch: Batch, features: TargetFeatures) -> DraftLoss:
        """Distillation over all training-time-test steps; see Drafter.loss."""
        labels = chain_labels(batch, self.settings.ttt_steps, self.settings.row_keep_ratio)
        rows = [labels.rows(step) for step in range(self.settings.ttt_steps)]
        streams = self._unroll(batch, features, rows, self.settings.earlier_state_ratio)
        return self.taught(streams, labels, batch, features)

    def taught(
        self, streams: Sequence[Tensor], labels: ChainLabels, batch: Batch, features: TargetFeatures
    ) -> DraftLoss:
        """The loss of the steps' output streams, each (N_k, D) at `labels.rows(k)`."""
        return self.distil(
            [self.normed(stream) for stream in streams], [self.draft_head], labels, batch, features,
            self.settings.step_loss_decay, self.settings.row_keep_ratio,
        )  # fmt: skip

    def flops(self, batch: Batch) -> int:
        """See Drafter.flops."""
        labels = chain_labels(batch, self.settings.ttt_steps, self.settings.row_keep_ratio)
        rows = [labels.rows(step) for step in range(self.settings.ttt_steps)]
        depth = batch.position_ids.flatten() + 1  # keys of step 0 that each row sees
        everywhere, outputs = depth.numel(), sum(map(len, rows))
        pairs = int(sum(depth[chosen].sum() for chosen in rows))
        layer = self.layer_flops(everywhere, everywhere + outputs - len(rows[0]), outputs, pairs)
        return layer + product_flops(self.draft_head, outputs) + self.teacher_flops(labels)

    @torch.no_grad()
    def greedy_drafts(self, batch: Batch, features: TargetFeatures, num_draft_tokens: int) -> Tensor:
        """Greedy drafts at every row; see Drafter.greedy_drafts."""
        everywhere = torch.arange(batch.input_ids.numel(), device=batch.input_ids.device)
        drafts = [
            self.draft_to_target_ids[self.logits(stream).argmax(dim=-1)]
            for stream in self._unroll(batch, features, [everywhere] * num_draft_tokens)
        ]
        return torch.stack(drafts, dim=-1).view(*batch.input_ids.shape, num_draft_tokens)  # (B, T, K)

    def _unroll(
        self, batch: Batch, features: TargetFeatures, rows: Sequence[Tensor], earlier_state_ratio: float = 0.0
    ) -> list[Tensor]:
        """Output streams of training-time test, on the text's own tokens.

        Args:
            batch: the text.
            features: of all its rows.
            rows: for each step the flattened rows (N_k,) that it is wanted for, among those of the step before.
            earlier_state_ratio: as in FedBackConfig.

        Returns:
            For each step (N_k, D).
        """
        positions = batch.position_ids.flatten()
        attend = TTTAttend(batch.document_spans(), rows[0])
        hidden = self.layer(shifted_ids(batch, 1), self.fuse(features), positions, attend, rows[0])
        streams = [hidden]
        for step, (before, chosen) in enumerate(pairwise(rows), start=1):
            kept = torch.searchsorted(before, chosen)
            attend.narrow(chosen, kept)
            ids = shifted_ids(batch, 1 + step)[chosen]
            state = hidden.index_select(0, kept)
            if earlier_state_ratio > 0:
                state = _some_earlier(state, streams, rows, step, batch, earlier_state_ratio)
            hidden = self.layer(ids, self.fed_back(state), positions[chosen] + step, attend)
            streams.append(hidden)
        return streams

    def logits(self, stream: Tensor) -> Tensor:
        """(..., D) output stream -> (..., Vd)."""
        head = self.draft_head  # the target's own may have another precision than what is trained
        return torch.nn.functional.linear(self.normed(stream).to(head.dtype), head)

    # --- decoding ----------------------------------------------------------------------------------------------------

    def start(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> FedBackState:
        """An empty state; see Proposer.start."""
        lengths = torch.zeros(len(prompts), dtype=torch.int64, device=self.draft_to_target_ids.device)
        return FedBackState(kv=KVBuffer(max_tokens), lengths=lengths)

    def observe(self, state: FedBackState, features: TargetFeatures, next_ids: Tensor, counts: Tensor) -> None:
        """Compute the committed rows from the target's true features; see Proposer.observe."""
        batch, num_rows = next_ids.shape
        slots = slots_after(state.lengths, num_rows, state.kv.capacity)
        mask = step_mask(state.lengths, num_rows, slots.end)
        fused = self.fuse(features).view(batch, num_rows, -1)
        outputs = self._decode_rows(state, fused, next_ids, slots.index, slots, mask)
        state.hidden = last_rows(outputs, counts)
        state.lengths = state.lengths + counts

    def first_logits(self, state: FedBackState) -> Tensor:
        """(B, Vd); see SerialDrafter.first_logits."""
        if state.hidden is None:
            raise ValueError("propose() needs a committed row to draft from: call observe() first")
        state.simulated = state.hidden[:, None]
        state.ancestry = Ancestry(len(state.hidden), state.hidden.device)
        return self.logits(state.hidden)

    def extend(self, state: FedBackState, tokens: Tensor, parents: Tensor, depth: int) -> Tensor:
        """(B, W, Vd); see SerialDrafter.extend."""
        assert state.simulated is not None and state.ancestry is not None  # first_logits came before
        batch, width = tokens.shape
        sequences = torch.arange(batch, device=tokens.device)[:, None]
        slots = slots_after(state.lengths + len(state.ancestry), width, state.kv.capacity)
        mask = tree_mask(state.lengths, state.ancestry.add(parents), slots.end)
        positions = (state.lengths - 1 + depth)[:, None].expand(-1, width)
        hidden = self.fed_back(state.simulated[sequences, parents + 1])
        outputs = self._decode_rows(state, hidden, tokens, positions, slots, mask)
        state.simulated = torch.cat([state.simulated, outputs], dim=1)
        return self.logits(outputs)

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

        output = self.layer(next_ids.flatten(), hidden.flatten(0, 1), positions.flatten(), attend)
        return output.view(batch, num_rows, -1)


def _some_earlier(
    state: Tensor, streams: Sequence[Tensor], rows: Sequence[Tensor], step: int, batch: Batch, ratio: float
) -> Tensor:
    """(N, D) the states that `step` reads, some of them replaced by those of earlier steps for the same place.

    Row t at step k - 1 has read the text up to x_{t+k}, and so has row t + d at step k - 1 - d.
    """
    chosen = rows[step]
    # Digits of the rows' random numbers that `chain_labels` did not use.
    drawn = (batch.uniforms.flatten()[chosen].double() * 4099 * (1 + step)).frac()
    distance = (drawn / ratio * (step - 1)).long() + 1  # 1 .. step - 1, or more where the state stays
    for back in range(1, step):
        other = rows[step - 1 - back]
        place = torch.searchsorted(other, chosen + back).clamp_max(len(other) - 1)
        found = (distance == back) & (other[place] == chosen + back)  # a row may have been dropped
        state = torch.where(found[:, None], streams[step - 1 - back].index_select(0, place), state)
    return state
