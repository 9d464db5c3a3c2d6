"""FLOPs of a drafter's training step: the matrix products that its formulas need, two per multiply-add.

What is counted, for a product of R rows with a weight of P elements:

    forward                     2 R P
    gradient of the input       2 R P     unless nothing before it is trained
    gradient of the weight      2 R P     unless it is frozen

Attention of H heads of size E that looks at N (row, key) pairs: 2 products forward and 4 backward, 2 H E N each. Not
counted: what an implementation computes twice to save memory (blocked attention makes its scores anew), keys that it
looks at in vain, the one dot product per row of each earlier draft step, and everything element-wise.
"""

from typing import Any

from torch import Tensor, nn


def linear_flops(layer: nn.Linear, rows: int, input_gradient: bool = True) -> int:
    """Training FLOPs of `rows` rows through `layer`."""
    return product_flops(layer.weight, rows, input_gradient)


def product_flops(weight: Tensor, rows: int, input_gradient: bool = True) -> int:
    """Training FLOPs of the product of `rows` rows with `weight`."""
    return 2 * rows * weight.numel() * (1 + input_gradient + weight.requires_grad)


def attention_flops(pairs: int, width: int) -> int:
    """Training FLOPs of attention over `pairs` of query row and key, with `width` = heads * head size."""
    return 6 * 2 * width * pairs


def decoder_flops(layers: nn.ModuleList, settings: Any, position_ids: Tensor) -> int:
    """Training FLOPs of a model's decoder layers over packed text, whose every row is read.

    Args:
        layers: of the model; if some of the first one is frozen, nothing before it is trained either.
        settings: the model's configuration.
        position_ids: (B, T), from 0 in each document.
    """
    linear = [[part for part in layer.modules() if isinstance(part, nn.Linear)] for layer in layers]
    rows, frozen = position_ids.numel(), any(not part.weight.requires_grad for part in linear[0])
    total = sum(
        linear_flops(part, rows, depth > 0 or not frozen) for depth, parts in enumerate(linear) for part in parts
    )
    head_size = settings.to_dict().get("head_dim") or settings.hidden_size // settings.num_attention_heads
    pairs = int((position_ids + 1).sum()) * len(layers)
    return total + attention_flops(pairs, settings.num_attention_heads * head_size)
