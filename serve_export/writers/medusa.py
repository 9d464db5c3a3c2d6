"""Medusa heads: in vLLM's own names, and in those of Medusa's authors, which TGI and TensorRT-LLM's builder read.

Facts that bite (each has a test):
- vLLM drops biases unless `medusa_fc_bias` is true, and takes every key with "num" and "heads" in it for `num_heads`.
- A shared LM head has to be in vLLM's file (`original_lm_head`, one copy), and has to be left out of TGI's.
- TGI takes a folder whose config names an architecture for another kind of model.
"""

import re
from pathlib import Path
from typing import Any

from torch import Tensor

from serve_export.source import Source
from serve_export.writers.common import save

ORIGINAL = "medusa_lm_head.safetensors"


def _heads(source: Source) -> dict[int, Tensor]:
    """LM heads of their own, by head."""
    found = source.floats()
    return {int(name.split(".")[1]): found[name] for name in found if name.startswith("lm_heads.")}


def tensors(source: Source) -> dict[str, Tensor]:
    """Tensors under vLLM's names."""
    renamed = {
        re.sub(r"blocks\.(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2.", name): tensor
        for name, tensor in source.floats().items()
    }
    shared = {} if _heads(source) else {"lm_heads.0.weight": source.cast(source.target.lm_head)}
    return renamed | shared


def config(source: Source) -> dict[str, Any]:
    """config.json for vLLM."""
    facts = source.servable.config
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": source.shape.hidden_size,
        "vocab_size": source.shape.vocab_size,
        "num_heads": facts["num_heads"],
        "num_hidden_layers": facts["num_layers"],
        "medusa_fc_bias": True,
        "original_lm_head": not _heads(source),
        "torch_dtype": source.dtype,
        "dtype": source.dtype,
    }


def write(source: Source, folder: Path) -> None:
    """Fill `folder` for vLLM."""
    save(folder, tensors(source), config(source))


def original_tensors(source: Source, with_heads: bool) -> dict[str, Tensor]:
    """Tensors under the names of Medusa's authors.

    Args:
        source: the heads.
        with_heads: give every head an LM head, a copy of the target's where it has none of its own.
    """
    depth = source.servable.config["num_layers"]
    named = {
        name.removeprefix("blocks."): tensor for name, tensor in source.floats().items() if name.startswith("blocks.")
    }
    heads = _heads(source)
    if with_heads and not heads:
        heads = {head: source.cast(source.target.lm_head) for head in range(source.servable.config["num_heads"])}
    return named | {f"{head}.{depth}.weight": weight for head, weight in heads.items()}


def original_config(source: Source) -> dict[str, Any]:
    """config.json as Medusa's authors write it. No `architectures`, see above."""
    facts = source.servable.config
    return {
        "base_model_name_or_path": source.target.folder,
        "medusa_num_heads": facts["num_heads"],
        "medusa_num_layers": facts["num_layers"],
        "medusa_fc_bias": True,
        "hidden_size": source.shape.hidden_size,
        "vocab_size": source.shape.vocab_size,
        "torch_dtype": source.dtype,
    }


def write_original(source: Source, folder: Path) -> None:
    """Fill `folder` for TGI, which takes a shared LM head from the target."""
    save(folder, original_tensors(source, with_heads=False), original_config(source), ORIGINAL)


def write_for_trtllm(source: Source, folder: Path) -> None:
    """Fill `folder` for TensorRT-LLM's engine builder, which wants an LM head for each head."""
    save(folder, original_tensors(source, with_heads=True), original_config(source), ORIGINAL)
