"""Documents -> packs of a fixed length, in an order that depends on seed and epoch alone.

A fixed length keeps the shapes of every step the same (compiled kernels and oneDNN primitives are reused). No state
is kept anywhere: the same arguments give the same packs, so a resumed run sees what the interrupted one would have.
"""

from collections.abc import Sequence

import torch

from conf import InputError
from data.batch import PADDING, Batch
from data.encode import Document

OPEN_PACKS = 32
"""How many packs may be open at once: more fill better, fewer keep the shuffled order."""


def pack_documents(lengths: Sequence[int], pack_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Group documents into packs: shuffle, then put each document where it leaves the least room.

    Args:
        lengths: tokens of each document.
        pack_tokens: capacity of a pack.
        seed: of the run.
        epoch: each epoch has its own order.

    Returns:
        Packs of document indices; every document is in exactly one.

    Raises:
        InputError: if a document is longer than a pack.
    """
    if max(lengths) > pack_tokens:
        raise InputError(
            f"a document has {max(lengths)} tokens, more than data.pack_tokens={pack_tokens}: raise data.pack_tokens"
        )
    generator = torch.Generator().manual_seed(seed * 100_003 + epoch)
    packs: list[list[int]] = []
    room: dict[int, int] = {}  # open pack -> tokens left
    for document in torch.randperm(len(lengths), generator=generator).tolist():
        fitting = [pack for pack, left in room.items() if left >= lengths[document]]
        if fitting:
            pack = min(fitting, key=lambda candidate: room[candidate])
        else:
            pack = len(packs)
            packs.append([])
            room[pack] = pack_tokens
        packs[pack].append(document)
        room[pack] -= lengths[document]
        if len(room) > OPEN_PACKS:
            del room[min(room, key=lambda candidate: room[candidate])]
    order = torch.randperm(len(packs), generator=generator).tolist()  # full packs close in runs; mix them again
    return [packs[pack] for pack in order]


def collate(
    packs: Sequence[Sequence[Document]],
    pack_tokens: int,
    token_weights: Sequence[Sequence[float]],
    seeds: Sequence[Sequence[int]] | None = None,
) -> Batch:
    """Lay documents out as a batch.

    Args:
        packs: the documents of each pack; a pack may be empty (all padding).
        pack_tokens: T.
        token_weights: for each pack, the weight of one supervised token of each of its documents.
        seeds: for each pack, the seed of each document's `uniforms`; None leaves them 0.

    Returns:
        A batch of (len(packs), pack_tokens).
    """
    shape = (len(packs), pack_tokens)
    input_ids = torch.zeros(shape, dtype=torch.int64)
    position_ids = torch.zeros(shape, dtype=torch.int64)
    document_ids = torch.full(shape, PADDING, dtype=torch.int64)
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    weights = torch.zeros(shape, dtype=torch.float32)
    uniforms = torch.zeros(shape, dtype=torch.float32)
    for pack, (documents, document_weights) in enumerate(zip(packs, token_weights, strict=True)):
        start = 0
        for index, (document, weight) in enumerate(zip(documents, document_weights, strict=True)):
            span = slice(start, start + len(document))
            input_ids[pack, span] = torch.tensor(document.input_ids)
            position_ids[pack, span] = torch.arange(len(document))
            document_ids[pack, span] = index
            loss_mask[pack, span] = torch.tensor(document.loss_mask)
            weights[pack, span] = loss_mask[pack, span] * weight
            if seeds is not None:
                generator = torch.Generator().manual_seed(seeds[pack][index])
                uniforms[pack, span] = torch.rand(len(document), generator=generator)
            start += len(document)
    return Batch(input_ids, position_ids, document_ids, loss_mask, weights, uniforms)


def collate_alone(document: Document, pack_tokens: int) -> Batch:
    """`document` as a batch of its own, padded to `pack_tokens`; its weights are 0, as where no loss is taken."""
    return collate([[document]], pack_tokens, [[0.0]])


def answer_weights(packs: Sequence[Sequence[Document]], normalisation: str) -> list[list[float]]:
    """Weight of one supervised token of each document of a global batch, so that the batch's weights sum to 1.

    Args:
        packs: all packs of the global batch, whichever rank or micro-batch they go to.
        normalisation: "token" (every supervised token counts the same) or "sequence" (every document does).
    """
    supervised = [[sum(document.loss_mask) for document in pack] for pack in packs]
    if normalisation == "token":
        total = sum(map(sum, supervised))
        return [[1 / total for _ in pack] for pack in supervised]
    documents = sum(map(len, packs))
    return [[1 / (documents * count) for count in pack] for pack in supervised]
