"""EAGLE-3 as one GGUF file (architecture `eagle3` of llama.cpp).

Facts that bite (each has a test):
- Rows of q and k are reordered: llama.cpp rotates neighbouring dimensions, transformers those half a head apart.
- `d2t` holds absolute ids here, and only here. `target_layers` counts the state entering a layer.
- The file needs a tokenizer, and llama.cpp's keys for it are its own: they are copied from the target's GGUF.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from conf import InputError
from serve_export.source import Source

NAME = "model.gguf"
ARCHITECTURE = "eagle3"
LAYER = {
    "midlayer.input_layernorm": "blk.0.attn_norm",
    "midlayer.hidden_norm": "blk.0.attn_norm_2",
    "midlayer.post_attention_layernorm": "blk.0.ffn_norm",
    "midlayer.self_attn.q_proj": "blk.0.attn_q",
    "midlayer.self_attn.k_proj": "blk.0.attn_k",
    "midlayer.self_attn.v_proj": "blk.0.attn_v",
    "midlayer.self_attn.o_proj": "blk.0.attn_output",
    "midlayer.mlp.gate_proj": "blk.0.ffn_gate",
    "midlayer.mlp.up_proj": "blk.0.ffn_up",
    "midlayer.mlp.down_proj": "blk.0.ffn_down",
    "fc": "fc",
    "norm": "output_norm",
    "lm_head": "output",
}
FREQUENCIES = "rope_freqs.weight"


def tensors(source: Source) -> dict[str, Tensor]:
    """Tensors under llama.cpp's names, float32."""
    shape, found = source.shape, {}
    for name, tensor in source.floats().items():
        part = tensor.float()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = shape.num_attention_heads if "q_proj" in name else shape.num_key_value_heads
            part = part.view(heads, 2, -1, part.shape[1]).transpose(1, 2).reshape(part.shape)
        found[f"{LAYER[name.removesuffix('.weight')]}.weight"] = part.contiguous()
    factors = frequency_factors(dict(shape.rope_parameters), shape.head_dim)
    if factors is not None:
        found[FREQUENCIES] = factors
    if len(source.draft_ids) < shape.vocab_size:
        found["d2t"] = source.draft_ids
    return found


def frequency_factors(rope: dict[str, Any], head_dim: int) -> Tensor | None:
    """What llama.cpp divides each of the head_dim / 2 frequencies by; None for plain rotary positions.

    Raises:
        InputError: for scalings that are no such factors.
    """
    if rope["rope_type"] == "default":
        return None
    if rope["rope_type"] != "llama3":
        raise InputError(f"stack=gguf knows plain and llama3 rotary positions, not {rope['rope_type']}: use stack=vllm")
    base, factor, original = rope["rope_theta"], rope["factor"], rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    wavelengths = 2 * torch.pi * base ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    share = ((original / wavelengths - low) / (high - low)).clamp(0, 1)  # 1: short waves, left as they are
    divisors: Tensor = 1 / ((1 - share) / factor + share)
    return divisors.float()


def write(source: Source, folder: Path) -> None:
    """Write `folder`/model.gguf.

    Raises:
        InputError: if the target's own file is missing, is no GGUF, or another target's.
    """
    keys = _tokenizer_keys(source.target_gguf, source.shape.vocab_size)
    writer = gguf.GGUFWriter(folder / NAME, ARCHITECTURE)
    for key, (value, kind) in {**_own_keys(source), **keys}.items():
        writer.add_key_value(key, value, kind[0], *kind[1:])
    matrices = gguf.GGMLQuantizationType.F32 if source.dtype == "float32" else gguf.GGMLQuantizationType.BF16
    for name, tensor in tensors(source).items():
        if tensor.dim() == 1:
            writer.add_tensor(name, tensor.numpy())
        else:
            writer.add_tensor(
                name, gguf.quants.quantize(tensor.numpy().astype(np.float32), matrices), raw_dtype=matrices
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _own_keys(source: Source) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    shape, facts, kinds = source.shape, source.servable.config, gguf.GGUFValueType
    number, fraction, flag = (kinds.UINT32,), (kinds.FLOAT32,), (kinds.BOOL,)
    own = {
        "block_count": (1, number),
        "context_length": (shape.max_position_embeddings, number),
        "embedding_length": (shape.hidden_size, number),
        "feed_forward_length": (shape.intermediate_size, number),
        "vocab_size": (shape.vocab_size, number),
        "attention.head_count": (shape.num_attention_heads, number),
        "attention.head_count_kv": (shape.num_key_value_heads, number),
        "attention.key_length": (shape.head_dim, number),
        "attention.value_length": (shape.head_dim, number),
        "attention.layer_norm_rms_epsilon": (shape.rms_norm_eps, fraction),
        "rope.dimension_count": (shape.head_dim, number),
        "rope.freq_base": (shape.rope_parameters["rope_theta"], fraction),
        "target_layers": (list(facts["aux_layers"]), (kinds.ARRAY, kinds.UINT32)),
        "target_hidden_size": (shape.hidden_size, number),
        "norm_before_residual": (facts["norm_before_residual"], flag),
        "norm_before_fc": (False, flag),
    }
    return {f"{ARCHITECTURE}.{key}": value for key, value in own.items()}


def _tokenizer_keys(path: str | None, vocab_size: int) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    if path is None:
        raise InputError(
            "stack=gguf needs target_gguf=FILE, the target's own GGUF: the head's file carries the same tokenizer, in "
            "llama.cpp's words"
        )
    try:
        fields = gguf.GGUFReader(path).fields
    except (OSError, ValueError) as error:
        raise InputError(f"target_gguf={path} cannot be read: {error}") from error
    found = {name: (field.contents(), tuple(field.types)) for name, field in fields.items() if "tokenizer." in name}
    tokens = found.get("tokenizer.ggml.tokens", ([], ()))[0]
    if len(tokens) != vocab_size:
        raise InputError(f"target_gguf={path} has {len(tokens)} tokens, the target {vocab_size}: it is another model's")
    return found
