"""EAGLE-3 in the format of the speculators library (0.9): vLLM serves the folder by itself, it names its target.

Facts that bite (each has a test):
- `norm_before_residual` is true there where nothing is said.
- The library allocates the embedding before it loads and leaves it as it was if the file has none: the target's goes
  along. Its `verifier_*` tensors must not: vLLM refuses names that it does not know.
- The layer is called `layers.0`, and layer ids count the state entering a layer.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from serve_export.source import Source
from serve_export.writers.common import layer_config, save

VERSION = "0.9.0"


def tensors(source: Source) -> dict[str, Tensor]:
    """Tensors under the library's names."""
    named = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in source.floats().items()}
    return {**named, "embed_tokens.weight": source.cast(source.target.embed_tokens), **source.vocabulary_map()}


def config(source: Source) -> dict[str, Any]:
    """The library's config.json."""
    facts, shape = source.servable.config, source.shape
    layer = layer_config(source) | {"num_aux_hidden_states": len(facts["aux_layers"])}
    model_type, architecture = ("qwen3", "Qwen3ForCausalLM") if facts["qk_norm"] else ("llama", "LlamaForCausalLM")
    proposal = {
        "proposal_type": "greedy", "speculative_tokens": source.num_draft_tokens, "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }  # fmt: skip
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": source.target.folder,
                "architectures": [source.target.model.config.architectures[0]],
            },
        },
        "transformer_layer_config": layer | {"architectures": [architecture], "model_type": model_type},
        "draft_vocab_size": len(source.draft_ids),
        "target_hidden_size": shape.hidden_size,
        "norm_before_residual": facts["norm_before_residual"],
        "norm_before_fc": False,
        "fc_norm": facts["fc_norm"],
        "norm_output": facts["norm_output"],
        "eagle_aux_hidden_state_layer_ids": facts["aux_layers"],
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": source.dtype,
        "dtype": source.dtype,
    }


def write(source: Source, folder: Path) -> None:
    """Fill `folder`."""
    save(folder, tensors(source), config(source))
