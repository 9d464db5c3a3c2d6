"""EAGLE-3 in the native form of EAGLE's authors, which vLLM, SGLang and TensorRT-LLM read, and llama.cpp's converter.

Facts that bite (each has a test):
- vLLM adds the `model.` prefix itself and fails on a file that has it.
- `d2t` holds offsets (target id = draft id + offset), and must be absent when the draft vocabulary is the whole one.
- Layer ids exist in two conventions. Ours and vLLM's top-level list count the state *entering* layer i; the nested
  list that SGLang reads counts the layer whose *output* it is, one less. Both are written.
- A layer with norms on queries and keys is vLLM's alone, under an architecture of its own.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from serve_export.source import Source
from serve_export.writers.common import layer_config, save


def tensors(source: Source) -> dict[str, Tensor]:
    """Tensors under the names that engines load."""
    return source.floats() | source.vocabulary_map()


def config(source: Source) -> dict[str, Any]:
    """config.json for all engines at once."""
    facts = source.servable.config
    aux_layers = facts["aux_layers"]
    layer = layer_config(source)
    normed = {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"} if facts["qk_norm"] else {}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer,
        **normed,
        "draft_vocab_size": len(source.draft_ids),
        "target_hidden_size": source.shape.hidden_size,
        "bias": False,
        "norm_before_residual": facts["norm_before_residual"],
        "norm_before_fc": False,
        "fc_norm": facts["fc_norm"],
        "norm_output": facts["norm_output"],
        "num_aux_hidden_states": len(aux_layers),
        "eagle_aux_hidden_state_layer_ids": aux_layers,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in aux_layers],
        },
    }


def write(source: Source, folder: Path) -> None:
    """Fill `folder`."""
    save(folder, tensors(source), config(source))
