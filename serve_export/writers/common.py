"""What the formats share: files, and the part of config.json that describes a decoder layer.

transformers 5 writes `rope_parameters` only, other engines read `rope_theta` and `rope_scaling`; missing, the base
silently becomes 10000. So all three are written, and both `torch_dtype` and `dtype`.
"""

from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from conf.records import write_json
from serve_export.source import Source

WEIGHTS = "model.safetensors"


def rope_keys(rope: dict[str, Any]) -> dict[str, Any]:
    """The keys of all engines for rotary positions as transformers 5 states them."""
    scaling = None if rope["rope_type"] == "default" else {k: v for k, v in rope.items() if k != "rope_theta"}
    return {"rope_theta": rope["rope_theta"], "rope_scaling": scaling, "rope_parameters": rope}


def layer_config(source: Source) -> dict[str, Any]:
    """config.json of a Llama layer beside the target."""
    shape = source.shape
    eos = sorted(source.target.eos_token_ids)
    return {
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": shape.hidden_act,
        "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": shape.max_position_embeddings,
        **rope_keys(dict(shape.rope_parameters)),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": source.target.hf_config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
        "torch_dtype": source.dtype,
        "dtype": source.dtype,
    }


def save(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], weights: str = WEIGHTS) -> None:
    """Write tensors and config.json."""
    save_file(tensors, str(folder / weights), metadata={"format": "pt"})
    write_json(folder / "config.json", config)
