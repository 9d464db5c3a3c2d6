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


def module_flops(module: nn.Module, settings: Any, rows: int, input_gradient: bool = True) -> int:
    """Training FLOPs of `rows` rows through all matrices of a model's layer, attention's scores apart.

    Args:
        module: the layer. transformers keeps routed experts as one parameter (experts, out, in).
        settings: the model's configuration: how many experts a row goes through.
        rows: so many.
        input_gradient: whether something before the layer is trained.
    """
    chosen = settings.to_dict().get("num_experts_per_tok", 0)
    total = 0
    for name, weight in module.named_parameters():
        if name.endswith("bias"):
            continue
        if weight.ndim == 2:
            total += product_flops(weight, rows, input_gradient)
        elif weight.ndim == 3:
            total += product_flops(weight, rows * chosen, input_gradient) // len(weight)
    return total


def decoder_flops(layers: nn.ModuleList, settings: Any, position_ids: Tensor) -> int:
    """Training FLOPs of a model's decoder layers over packed text, whose every row is read.

    Args:
        layers: of the model; if some of the first one is frozen, nothing before it is trained either.
        settings: the model's configuration.
        position_ids: (B, T), from 0 in each document.
    """
    frozen = any(not weight.requires_grad for weight in layers[0].parameters())
    total = sum(
        module_flops(layer, settings, position_ids.numel(), depth > 0 or not frozen)
        for depth, layer in enumerate(layers)
    )
    head_size = settings.to_dict().get("head_dim") or settings.hidden_size // settings.num_attention_heads
    pairs = int((position_ids + 1).sum()) * len(layers)
    return total + attention_flops(pairs, settings.num_attention_heads * head_size)
