"""What travels between data, target and drafter: `Batch`, `Wants`, `TargetFeatures`.

Shape letters: B = packs, T = tokens per pack, D = hidden size, A = auxiliary layers, V = target vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from data.cache import TargetCache

PADDING = -1
"""Document id of padding."""


@dataclass(frozen=True)
class Batch:
    """Packed conversations: each row is one pack, each document in it sees only itself."""

    input_ids: Tensor
    """(B, T) int64."""
    position_ids: Tensor
    """(B, T) int64, restarts at 0 with each document."""
    document_ids: Tensor
    """(B, T) int64, constant within a document, ascending within a pack; PADDING where there is no document."""
    loss_mask: Tensor
    """(B, T) bool, True where the target itself generated the token."""
    token_weights: Tensor
    """(B, T) float32, the share of each token in the loss of the *global* batch; 0 outside loss_mask. They sum to 1
    over all micro-batches of all ranks, so that the loss does not depend on how the global batch was cut."""
    uniforms: Tensor
    """(B, T) float32, each token's own random number in [0, 1) of this epoch: for drafters that train on a random part
    of the rows. It belongs to the document, however the global batch was cut."""

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on `device`."""
        return replace(self, **{name: tensor.to(device) for name, tensor in vars(self).items()})

    def document_spans(self) -> list[tuple[int, int]]:
        """[start, end) of each document, as indices into the flattened (B * T) rows. Padding is in none."""
        ids = self.document_ids.cpu()
        spans: list[tuple[int, int]] = []
        for pack, row in enumerate(ids):
            present, lengths = torch.unique_consecutive(row, return_counts=True)
            start = pack * ids.shape[1]
            for document, length in zip(present.tolist(), lengths.tolist(), strict=True):
                if document != PADDING:
                    spans.append((start, start + length))
                start += length
        return spans


@dataclass(frozen=True)
class Wants:
    """Which tensors of the target a drafter needs; the target computes no others."""

    aux_layers: tuple[int, ...]
    """Indices into HF `hidden_states`: 0 = embeddings, i = the state *entering* layer i. Ascending."""
    last_hidden_state: bool
    """Whether the state after the final norm is needed (the input of the target's LM head)."""


@dataclass(frozen=True)
class TargetFeatures:
    """What a drafter sees of the target, row t after reading token t."""

    aux_hidden_states: Tensor
    """(B, T, A * D), the wanted layers side by side, shallowest first."""
    last_hidden_state: Tensor | None
    """(B, T, D) *after* the target's final norm: `lm_head(last_hidden_state)` are the target's logits."""
    cache: TargetCache | None = None
    """In decoding: the target's keys and values, for drafters that run some of its layers."""

    def select(self, rows: Tensor) -> "TargetFeatures":
        """The given rows of each sequence: (B, P) int64 -> features of shape (B, P, ...)."""
        sequences = torch.arange(len(rows), device=rows.device)[:, None]
        last = self.last_hidden_state
        return TargetFeatures(
            aux_hidden_states=self.aux_hidden_states[sequences, rows],
            last_hidden_state=None if last is None else last[sequences, rows],
            cache=self.cache,
        )


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """(B, longest) int64, filled with 0 on the right."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=torch.int64, device=device)


def last_rows(rows: Tensor, counts: Tensor) -> Tensor:
    """(B, M, ...) -> (B, ...): the last of the first `counts` (B,) rows of each sequence."""
    return rows[torch.arange(len(counts), device=counts.device), counts - 1]
