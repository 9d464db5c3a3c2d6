"""Target features for training, kept in memory from one epoch to the next as far as they fit.

Each document has one *home pack*, its pack in epoch 0, and its cached features always come from a capture of that pack:
matrix kernels may round a row differently in other company, and a run that was resumed in a later epoch must see the
very features that the uninterrupted run kept. Which documents are cached follows from the budget alone, not from what
happened before.
"""

from collections.abc import Sequence

import torch

from data.batch import TargetFeatures, Wants
from data.encode import Document
from data.loader import MicroBatch, TrainingStream
from data.packing import collate
from data.target import Target

GIB = 2**30


class FeatureStore:
    """Gives the target's features of a micro-batch."""

    def __init__(self, target: Target, wants: Wants, stream: TrainingStream) -> None:
        """Decide which documents are cached: whole home packs in epoch-0 order, up to data.feature_cache_gib."""
        self.target = target
        self.wants = wants
        self._documents = stream.documents
        self._pack_tokens = stream.data.pack_tokens
        self._cached: dict[int, TargetFeatures] = {}
        self._home: dict[int, Sequence[int]] = {}
        room = stream.data.feature_cache_gib if stream.repeats_documents else 0.0
        for pack in stream.first_epoch:
            tokens = sum(len(stream.documents[index]) for index in pack)
            room -= estimate_gib(tokens, target.hf_config.hidden_size, wants, target.model.dtype)
            if room < 0:
                break
            self._home.update(dict.fromkeys(pack, pack))

    def features(self, micro_batch: MicroBatch) -> TargetFeatures:
        """Features of every row of the batch, in the target's dtype; rows of padding are arbitrary."""
        documents = [index for pack in micro_batch.packs for index in pack]
        if not documents or not all(index in self._home for index in documents):
            return self.target.capture(micro_batch.batch.to(self.target.device), self.wants)
        for index in documents:
            if index not in self._cached:
                self._capture(self._home[index])
        return self._assemble(micro_batch)

    def _capture(self, pack: Sequence[int]) -> None:
        members: list[Document] = [self._documents[index] for index in pack]
        batch = collate([members], self._pack_tokens, [[0.0] * len(members)]).to(self.target.device)
        features = self.target.capture(batch, self.wants)
        for index, (start, end) in zip(pack, batch.document_spans(), strict=True):
            last = features.last_hidden_state
            self._cached[index] = TargetFeatures(  # clones: a view would keep the whole pack alive
                aux_hidden_states=features.aux_hidden_states[0, start:end].clone(),
                last_hidden_state=None if last is None else last[0, start:end].clone(),
            )

    def _assemble(self, micro_batch: MicroBatch) -> TargetFeatures:
        shape = micro_batch.batch.input_ids.shape
        first = next(iter(self._cached.values()))
        states = first.aux_hidden_states.new_zeros(*shape, first.aux_hidden_states.shape[-1])
        last = first.last_hidden_state
        final = None if last is None else last.new_zeros(*shape, last.shape[-1])
        for row, members in enumerate(micro_batch.packs):
            start = 0
            for index in members:
                part = self._cached[index]
                rows = slice(start, start + len(part.aux_hidden_states))
                states[row, rows] = part.aux_hidden_states
                if final is not None and part.last_hidden_state is not None:
                    final[row, rows] = part.last_hidden_state
                start = rows.stop
        return TargetFeatures(aux_hidden_states=states, last_hidden_state=final)


def estimate_gib(num_tokens: int, hidden_size: int, wants: Wants, dtype: torch.dtype) -> float:
    """Memory that the features of `num_tokens` tokens take."""
    states = len(wants.aux_layers) + wants.last_hidden_state
    return num_tokens * states * hidden_size * dtype.itemsize / GIB
