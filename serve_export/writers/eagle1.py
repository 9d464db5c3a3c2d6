"""EAGLE-1 heads (EAGLE-2 is the same head with a tree). Embedding and LM head are the target's: vLLM refuses a file
that has an `lm_head`.

vLLM and SGLang want different architectures, so there are two forms. SGLang always has a bias on fc and leaves it
random where the file has none: its form has zeros.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from serve_export.source import Source
from serve_export.writers.common import layer_config, save


def tensors(source: Source) -> dict[str, Tensor]:
    """Tensors under the names that both engines load."""
    return {name.replace("decoder_layer.", "layers.0."): tensor for name, tensor in source.floats().items()}


def config(source: Source, architecture: str = "LlamaForCausalLM") -> dict[str, Any]:
    """config.json."""
    return {"architectures": [architecture], **layer_config(source), "bias": architecture != "LlamaForCausalLM"}


def write(source: Source, folder: Path) -> None:
    """Fill `folder` for vLLM."""
    save(folder, tensors(source), config(source))


def write_for_sglang(source: Source, folder: Path) -> None:
    """Fill `folder` for SGLang."""
    bias = source.cast(torch.zeros(source.shape.hidden_size))
    save(folder, tensors(source) | {"fc.bias": bias}, config(source, "LlamaForCausalLMEagle"))
