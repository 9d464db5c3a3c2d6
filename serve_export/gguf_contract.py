"""What an EAGLE-3 GGUF file must hold, as llama.cpp's loader reads it; see contract.py."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from serve_export.contract import ABSENT, Shape, id_faults, tensor_faults, value_faults
from serve_export.readers.llama_cpp import parts
from serve_export.source import Known

TOKENIZER = ("tokenizer.ggml.model", "tokenizer.ggml.tokens", "tokenizer.ggml.token_type")


def faults(folder: Path, known: Known) -> list[str]:
    """Everything that is wrong with `folder`/model.gguf, one sentence each.

    Raises:
        InputError: if the file is missing or damaged.
    """
    keys, tensors = parts(folder / "model.gguf")
    found = [fault for key, value in _keys(known).items() for fault in value_faults(key, keys.get(key, ABSENT), value)]
    found += [f"config lacks {key}" for key in TOKENIZER if key not in keys]
    wanted: dict[str, tuple[Shape, torch.dtype]] = {
        name: (shape, torch.float32) for name, shape in _tensors(known).items()
    }
    if known.has_map:
        wanted["d2t"] = ((known.draft_vocab_size,), torch.int64)
    found += tensor_faults(tensors, wanted)
    if known.has_map and "d2t" in tensors:
        found += id_faults(tensors["d2t"], known, "absolute ids")
    return found + _factor_faults(tensors, known)


def _keys(known: Known) -> dict[str, Any]:
    shape, facts = known.shape, known.facts
    own = {
        "block_count": 1,
        "context_length": shape["max_position_embeddings"],
        "embedding_length": shape["hidden_size"],
        "feed_forward_length": shape["intermediate_size"],
        "vocab_size": shape["vocab_size"],
        "attention.head_count": shape["num_attention_heads"],
        "attention.head_count_kv": shape["num_key_value_heads"],
        "attention.key_length": shape["head_dim"],
        "attention.value_length": shape["head_dim"],
        "attention.layer_norm_rms_epsilon": _as_float32(shape["rms_norm_eps"]),
        "rope.dimension_count": shape["head_dim"],
        "rope.freq_base": _as_float32(shape["rope_parameters"]["rope_theta"]),
        "target_layers": facts["aux_layers"],
        "target_hidden_size": shape["hidden_size"],
        "norm_before_residual": facts["norm_before_residual"],
        "norm_before_fc": False,
    }
    return {"general.architecture": "eagle3"} | {f"eagle3.{key}": value for key, value in own.items()}


def _as_float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def _tensors(known: Known) -> dict[str, Shape]:
    shape = known.shape
    width, inner, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * dim, shape["num_key_value_heads"] * dim
    block: dict[str, Shape] = {
        "attn_norm": (width,), "attn_norm_2": (width,), "ffn_norm": (width,), "attn_q": (queries, 2 * width),
        "attn_k": (keys, 2 * width), "attn_v": (keys, 2 * width), "attn_output": (width, queries),
        "ffn_gate": (inner, width), "ffn_up": (inner, width), "ffn_down": (width, inner),
    }  # fmt: skip
    scaled: dict[str, Shape] = (
        {} if shape["rope_parameters"]["rope_type"] == "default" else {"rope_freqs.weight": (dim // 2,)}
    )
    return {
        **{f"blk.0.{name}.weight": size for name, size in block.items()},
        "fc.weight": (width, 3 * width),
        "output_norm.weight": (width,),
        "output.weight": (known.draft_vocab_size, width),
        **scaled,
    }


def _factor_faults(tensors: dict[str, Tensor], known: Known) -> list[str]:
    """Divisors of the rotary frequencies lie between 1 and the factor, and grow with the wave."""
    if "rope_freqs.weight" not in tensors or known.shape["rope_parameters"]["rope_type"] == "default":
        return []
    factors = tensors["rope_freqs.weight"]
    low, high, factor = float(factors.min()), float(factors.max()), known.shape["rope_parameters"]["factor"]
    good = low >= 1 and high <= factor * (1 + 1e-6) and bool((factors.diff() >= 0).all())
    return [] if good else [f"rope_freqs.weight must ascend within 1..{factor}"]
