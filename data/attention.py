"""Attention of the target over packed documents: one causal kernel call per document, no (T, T) mask.

Registered with transformers as the attention implementation `packed_sdpa`: calls that name document borders
(`cu_seq_lens_q`, the keyword of its flash-attention path) run document by document, all others (cached decoding,
sliding windows shorter than a document) as transformers' own `sdpa`.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "packed_sdpa"


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    cu_seq_lens_q: Tensor | None = None,
    sliding_window: int | None = None,
    **passed_on: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it.

    Args:
        module: the layer's attention module.
        query: (1, H, R, E), R = all packs laid end to end.
        key: (1, G, R, E).
        value: (1, G, R, E).
        attention_mask: transformers' mask; not needed where the borders say everything.
        cu_seq_lens_q: (documents + 1,) ascending borders within R; rows after the last are padding and get zeros.
        sliding_window: of this layer, or None.
        passed_on: `scaling`, `dropout` and what else transformers hands to its own implementation.

    Returns:
        (1, R, H, E) and None, as transformers expects.
    """
    if passed_on.get("softcap") is not None:
        raise ValueError("attention with soft-capped scores is not supported: this kernel would leave the cap out")
    spans = [] if cu_seq_lens_q is None else cu_seq_lens_q.tolist()
    longest = max((end - start for start, end in pairwise(spans)), default=0)
    if cu_seq_lens_q is None or (sliding_window is not None and longest > sliding_window):
        own: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, sliding_window=sliding_window, **passed_on
        )
        return own
    out = torch.zeros_like(query)
    for start, end in pairwise(spans):
        rows = slice(start, end)
        out[:, :, rows] = nn.functional.scaled_dot_product_attention(
            query[:, :, rows], key[:, :, rows], value[:, :, rows],
            is_causal=True, scale=passed_on.get("scaling"), enable_gqa=True,
        )  # fmt: skip
    return out.transpose(1, 2), None


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
