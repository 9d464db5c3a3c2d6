"""Attention of the target: packed documents (training) and sequences of different length (decoding).

Registered with transformers as the attention implementation `outrider`; no mask function is registered, so transformers
builds none. Which rows see which keys comes from what the caller passes through the model:

    cu_seq_lens_q   document borders: one causal kernel call per document, no (T, T) mask
    attention_mask  (B, 1, M, L) bool, from `data.cache`: rows of a cached step; `distance` besides, for sliding windows
    neither         plain causal attention, also after a cache of transformers' own (unpadded)
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from data.blocked_attention import attend_in_blocks, by_key_head

NAME = "outrider"
FOLD_ROWS = 64
"""Up to so many rows, the query heads that share keys and values become more rows of one head: each key is read once
instead of once per query head (7 times faster for one row of 8 sequences in bf16 on a CPU). With more rows it gains
nothing, and the repeated mask costs memory."""


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **passed_on: Any
) -> tuple[Tensor, None]:
    """Attention as transformers calls it.

    Args:
        module: the layer's attention module.
        query: (B, H, M, E).
        key: (B, G, L, E).
        value: (B, G, L, E), or of another width, which the result then has.
        attention_mask: (B, 1, M, L) bool, True where a row may look; None for packed or plain causal attention.
        passed_on: what callers and transformers hand over by name. Of use here:
            cu_seq_lens_q (documents + 1,) ascending borders within M (B = 1);
            distance (B, 1, M, L) int64, how many positions each key lies before each row;
            attend, for one layer of a drafter that keeps its own keys: called instead of this kernel, with
            (H, M, E), (G, M, E), (G, M, E), to return (H, M, E);
            sliding_window of this layer: rows see keys at distance < sliding_window;
            scaling of the scores, 1 / sqrt(E) by default.

    Returns:
        (B, M, H, E) and None, as transformers expects.

    Raises:
        ValueError: for soft-capped scores and dropout, which this kernel would leave out.
    """
    if passed_on.get("attend") is not None:
        return _attend_elsewhere(query, key, value, passed_on["attend"], passed_on.get("scaling")), None
    if passed_on.get("softcap") is not None or passed_on.get("dropout"):
        raise ValueError("attention with soft-capped scores or dropout is not supported: this kernel has neither")
    sliding_window, scaling = passed_on.get("sliding_window"), passed_on.get("scaling")
    distance, cu_seq_lens_q = passed_on.get("distance"), passed_on.get("cu_seq_lens_q")
    if attention_mask is None and key.shape[2] != query.shape[2]:
        attention_mask = _band(query.shape[2], key.shape[2], sliding_window, query.device)
    elif attention_mask is not None and sliding_window is not None and distance is not None:
        attention_mask = attention_mask & (distance < sliding_window)
    if attention_mask is not None:
        return grouped_attention(query, key, value, attention_mask, scaling).transpose(1, 2), None
    borders = [0, query.shape[2]] if cu_seq_lens_q is None else cu_seq_lens_q.tolist()
    # The blocked kernel has no gradient, and takes values as wide as keys.
    blocked = query.device.type == "cpu" and not query.requires_grad and value.shape[-1] == query.shape[-1]
    if cu_seq_lens_q is not None and sliding_window is None and blocked:
        return _attend_on_cpu(query[0], key[0], value[0], borders, scaling)[None], None
    out = query.new_zeros(*query.shape[:-1], value.shape[-1])
    for start, end in pairwise(borders):
        rows = slice(start, end)
        window = None
        if sliding_window is not None and end - start > sliding_window:
            window = _band(end - start, end - start, sliding_window, query.device)
        out[:, :, rows] = grouped_attention(query[:, :, rows], key[:, :, rows], value[:, :, rows], window, scaling)
    return out.transpose(1, 2), None


def grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None = None
) -> Tensor:
    """Attention of query heads that share keys and values.

    Args:
        query: (B, H, M, E).
        key: (B, G, L, E); H is a multiple of G.
        value: (B, G, L, E).
        mask: bool, broadcasts to (B, 1, M, L), True where a row may look; None: causal.
        scaling: of the scores, 1 / sqrt(E) by default.

    Returns:
        (B, H, M, E).
    """
    shape = query.shape
    share = shape[1] // key.shape[1]  # query heads of one key/value head
    if mask is None or share == 1 or shape[2] > FOLD_ROWS:
        return nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
        )
    rows = query.reshape(shape[0], key.shape[1], share * shape[2], shape[3])
    mask = mask.repeat(1, 1, share, 1)
    out = nn.functional.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(*shape[:-1], value.shape[-1])


def _attend_elsewhere(
    query: Tensor, key: Tensor, value: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor], scaling: float | None
) -> Tensor:
    """(1, M, H, E) of whoever keeps the keys. It scales scores by 1 / sqrt(E) and takes values as wide as keys."""
    width, size = query.shape[-1], value.shape[-1]
    if scaling is not None:
        query = query * (scaling * width**0.5)
    out = attend(query[0], key[0], nn.functional.pad(value[0], (0, width - size)))
    return out[..., :size].transpose(0, 1)[None]


def _attend_on_cpu(query: Tensor, key: Tensor, value: Tensor, borders: list[int], scaling: float | None) -> Tensor:
    """(H, M, E) queries, (G, M, E) keys and values -> (M, H, E), causal between `borders`."""
    grouped = by_key_head(query, len(key))
    rows = torch.arange(query.shape[1])
    out, _ = attend_in_blocks(grouped, key, value, rows, list(pairwise(borders)), scaling or query.shape[-1] ** -0.5)
    return out.flatten(0, 1).transpose(0, 1)


def _band(num_rows: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """(M, L) bool: the last M of L rows see themselves and earlier keys, at distance < window."""
    distance = torch.arange(num_keys - num_rows, num_keys, device=device)[:, None] - torch.arange(
        num_keys, device=device
    )
    return (distance >= 0) & (distance < (num_keys if window is None else window))


AttentionInterface.register(NAME, attention)
