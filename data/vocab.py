"""The draft vocabulary: the part of the target's vocabulary that a drafter can propose."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from conf import InputError
from data.encode import Document


def choose_draft_vocabulary(
    documents: Sequence[Document], special_ids: Iterable[int], size: int, vocab_size: int
) -> Tensor:
    """The most frequent *supervised* tokens: those the target itself generates.

    Ties, and room that the corpus does not fill, go to the lower id (in byte-pair vocabularies these are the more
    frequent merges).

    Args:
        documents: the training corpus.
        special_ids: always part of the vocabulary (end of turn, template tokens).
        size: Vd.
        vocab_size: V.

    Returns:
        draft_to_target_ids (Vd,) int64, absolute target ids, ascending and unique.

    Raises:
        InputError: if `size` exceeds the vocabulary or cannot hold the special tokens.
    """
    special = torch.tensor(sorted({token for token in special_ids if token < vocab_size}), dtype=torch.int64)
    if not len(special) <= size <= vocab_size:
        raise InputError(
            f"draft vocabulary of {size} tokens: expected between {len(special)} (the special tokens) and "
            f"{vocab_size} (the target's vocabulary); set drafter.draft_vocab_size"
        )
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for document in documents:
        supervised = torch.tensor(document.input_ids)[torch.tensor(document.loss_mask)]
        counts += torch.bincount(supervised, minlength=vocab_size)
    counts[special] = counts.max() + 1
    return torch.sort(counts, descending=True, stable=True).indices[:size].sort().values


def coverage(documents: Sequence[Document], draft_to_target_ids: Tensor) -> float:
    """Share of supervised tokens that the draft vocabulary holds: an upper bound on any acceptance rate."""
    held = set(draft_to_target_ids.tolist())
    supervised = [
        token
        for document in documents
        for token, answered in zip(document.input_ids, document.loss_mask, strict=True)
        if answered
    ]
    return sum(token in held for token in supervised) / len(supervised)
