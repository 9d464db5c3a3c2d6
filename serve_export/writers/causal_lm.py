"""A draft model as an ordinary folder of transformers, tokenizer included: engines load it as they load a target."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from serve_export.source import Source
from serve_export.writers.common import rope_keys, save


def tensors(source: Source) -> dict[str, Tensor]:
    """The model's tensors; a tied LM head is stored once, as the embedding."""
    found = source.floats()
    if source.servable.config["model"].get("tie_word_embeddings"):
        found.pop("lm_head.weight", None)
    return found


def config(source: Source) -> dict[str, Any]:
    """The model's own configuration, in the words of old and new transformers."""
    model = {key: value for key, value in source.servable.config["model"].items() if not isinstance(value, torch.dtype)}
    rope = model.get("rope_parameters")
    legacy = rope_keys(rope) if rope and "rope_theta" in rope else {}
    return model | legacy | {"torch_dtype": source.dtype, "dtype": source.dtype}


def write(source: Source, folder: Path) -> None:
    """Fill `folder`."""
    save(folder, tensors(source), config(source))
    source.target.tokenizer.save_pretrained(folder)  # the draft model's own has the same tokens: training saw to it
    source.target.model.generation_config.save_pretrained(folder)
