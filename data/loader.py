"""The training stream: which documents form which optimizer step, for every rank, from seed and step number alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from conf import InputError, config
from data.batch import Batch
from data.encode import Document
from data.packing import answer_weights, collate, pack_documents


@config
class DataConfig:
    """Values: conf/data/*.yaml."""

    max_tokens: int = Field(ge=2)
    """Longest document; longer conversations are an error, never silently cut."""
    packing: bool
    """Put several documents into one pack; False gives each its own (for comparisons: slower, same loss)."""
    pack_tokens: int = Field(ge=2)
    """T, the fixed length of a pack; at least the longest document."""
    micro_batch_packs: int = Field(ge=1)
    """B, packs in one forward pass."""
    global_batch_packs: int = Field(ge=1)
    """Packs of one optimizer step over all ranks and accumulation steps."""
    loss_normalisation: Literal["token", "sequence"]
    """token: every supervised token of a global batch counts the same; sequence: every document does."""
    feature_cache_gib: float = Field(ge=0)
    """Keep target features in memory for later epochs, up to so much per rank."""
    num_workers: int = Field(ge=0)
    """Processes per rank that collate batches ahead; 0 collates in the training process (some ms a step)."""


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass: a batch, and which documents lie in it (pack by pack)."""

    batch: Batch
    packs: list[list[int]]


class TrainingStream:
    """All optimizer steps of a run. Stateless: `micro_batches(step, ...)` is a function of its arguments."""

    def __init__(self, documents: Sequence[Document], data: DataConfig, seed: int, epochs: float) -> None:
        """Plan the run.

        Args:
            documents: the training corpus.
            data: batching.
            seed: of the order.
            epochs: passes over the corpus; a fraction ends within one.
        """
        self.documents = documents
        self.data = data
        self._seed = seed
        self.repeats_documents = epochs > 1
        self.first_epoch = self._epoch(seed, 0)
        self._plan: list[tuple[int, list[int]]] = []  # epoch, documents of a pack
        for epoch in range(math.ceil(epochs)):
            packs = self._epoch(seed, epoch)
            share = min(1.0, epochs - epoch)
            self._plan += [(epoch, pack) for pack in packs[: max(1, round(share * len(packs)))]]
        self.total_steps = math.ceil(len(self._plan) / data.global_batch_packs)

    def _epoch(self, seed: int, epoch: int) -> list[list[int]]:
        lengths = [len(document) for document in self.documents]
        packs = pack_documents(lengths, self.data.pack_tokens, seed, epoch)
        return packs if self.data.packing else [[document] for pack in packs for document in pack]

    def accumulation_steps(self, world_size: int) -> int:
        """Micro-batches per rank and optimizer step.

        Raises:
            InputError: if the global batch does not divide evenly.
        """
        per_pass = self.data.micro_batch_packs * world_size
        if self.data.global_batch_packs % per_pass:
            raise InputError(
                f"data.global_batch_packs={self.data.global_batch_packs} must be a multiple of data.micro_batch_packs "
                f"x ranks = {self.data.micro_batch_packs} x {world_size}"
            )
        return self.data.global_batch_packs // per_pass

    def micro_batches(self, step: int, rank: int, world_size: int) -> list[MicroBatch]:
        """This rank's part of optimizer step `step` (0-based). The last step is filled up with empty packs."""
        size, micro = self.data.global_batch_packs, self.data.micro_batch_packs
        planned = self._plan[step * size : (step + 1) * size]
        planned += [(0, []) for _ in range(size - len(planned))]
        packs = [pack for _, pack in planned]
        seeds = [[self._document_seed(epoch, index) for index in pack] for epoch, pack in planned]
        documents = [[self.documents[index] for index in pack] for pack in packs]
        weights = answer_weights(documents, self.data.loss_normalisation)
        parts = []
        for accumulation in range(self.accumulation_steps(world_size)):
            start = (accumulation * world_size + rank) * micro
            chosen = slice(start, start + micro)
            batch = collate(documents[chosen], self.data.pack_tokens, weights[chosen], seeds[chosen])
            parts.append(MicroBatch(batch=batch, packs=packs[chosen]))
        return parts

    def _document_seed(self, epoch: int, index: int) -> int:
        """Of a document's random numbers in one epoch. Distinct for corpora of up to a million documents."""
        return (self._seed * 100_003 + epoch) * 1_000_003 + index

    def trained_tokens(self, steps: int) -> int:
        """Tokens of the documents in the first `steps` optimizer steps."""
        planned = self._plan[: steps * self.data.global_batch_packs]
        return sum(len(self.documents[index]) for _, pack in planned for index in pack)
