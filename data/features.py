"""Target features for training: captured as batches arrive, kept in memory for the next epoch as far as it fits."""

import torch

from data.batch import TargetFeatures, Wants
from data.loader import MicroBatch
from data.target import Target

GIB = 2**30


class FeatureStore:
    """Gives the target's features of a micro-batch; documents seen before come from memory."""

    def __init__(self, target: Target, wants: Wants, cache_gib: float) -> None:
        self.target = target
        self.wants = wants
        self._room_bytes = cache_gib * GIB
        self._documents: dict[int, TargetFeatures] = {}

    def features(self, micro_batch: MicroBatch) -> TargetFeatures:
        """Features of every row of the batch, in the target's dtype; rows of padding are arbitrary."""
        documents = [index for pack in micro_batch.packs for index in pack]
        if documents and all(index in self._documents for index in documents):
            return self._assemble(micro_batch)
        features = self.target.capture(micro_batch.batch.to(self.target.device), self.wants)
        self._keep(micro_batch, features, documents)
        return features

    def _keep(self, micro_batch: MicroBatch, features: TargetFeatures, documents: list[int]) -> None:
        width = micro_batch.batch.input_ids.shape[1]
        for index, (start, end) in zip(documents, micro_batch.batch.document_spans(), strict=True):
            pack, columns = start // width, slice(start % width, start % width + end - start)
            states, last = features.aux_hidden_states[pack, columns], features.last_hidden_state
            part = TargetFeatures(
                aux_hidden_states=states.clone(),
                last_hidden_state=None if last is None else last[pack, columns].clone(),
            )
            size = sum(tensor.nbytes for tensor in vars(part).values() if tensor is not None)
            if index not in self._documents and size <= self._room_bytes:
                self._room_bytes -= size
                self._documents[index] = part

    def _assemble(self, micro_batch: MicroBatch) -> TargetFeatures:
        shape = micro_batch.batch.input_ids.shape
        first = next(iter(self._documents.values()))
        states = first.aux_hidden_states.new_zeros(*shape, first.aux_hidden_states.shape[-1])
        last = first.last_hidden_state
        final = None if last is None else last.new_zeros(*shape, last.shape[-1])
        for pack, members in enumerate(micro_batch.packs):
            start = 0
            for index in members:
                part = self._documents[index]
                rows = slice(start, start + len(part.aux_hidden_states))
                states[pack, rows] = part.aux_hidden_states
                if final is not None and part.last_hidden_state is not None:
                    final[pack, rows] = part.last_hidden_state
                start = rows.stop
        return TargetFeatures(aux_hidden_states=states, last_hidden_state=final)


def estimate_gib(num_tokens: int, hidden_size: int, wants: Wants, dtype: torch.dtype) -> float:
    """Memory that the features of `num_tokens` tokens take."""
    states = len(wants.aux_layers) + wants.last_hidden_state
    return num_tokens * states * hidden_size * dtype.itemsize / GIB
