"""EAGLE-3 from a GGUF file: llama.cpp's names, absolute ids, and its order of rotated dimensions."""

from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

from conf import InputError
from serve_export.readers.eagle3 import Eagle3
from serve_export.readers.layer import Probe

NAMES = {
    "attn_norm": "input_layernorm", "attn_norm_2": "hidden_norm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
AROUND = {"fc.weight": "fc.weight", "output_norm.weight": "norm.weight", "output.weight": "lm_head.weight"}


def parts(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Keys and tensors (float32; `d2t` int64) of a file.

    Raises:
        InputError: if it is none.
    """
    try:
        reader = gguf.GGUFReader(path)
    except (OSError, ValueError, IndexError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    keys = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {}
    for tensor in reader.tensors:
        whole = tensor.tensor_type == gguf.GGMLQuantizationType.I64
        values = tensor.data if whole else gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        tensors[tensor.name] = torch.from_numpy(values.copy())
    return keys, tensors


def read(folder: Path, probe: Probe) -> Tensor:
    """(K, Vd) draft logits."""
    keys, stored = parts(folder / "model.gguf")
    own = {name.removeprefix("eagle3."): value for name, value in keys.items()}
    dim = own["attention.key_length"]
    named = {AROUND[name]: stored[name] for name in AROUND}
    for name, ours in NAMES.items():
        tensor = stored[f"blk.0.{name}.weight"]
        if name in ("attn_q", "attn_k"):  # neighbours -> half a head apart
            tensor = tensor.view(-1, dim // 2, 2, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        named[f"midlayer.{ours}.weight"] = tensor
    divisors = stored.get("rope_freqs.weight")
    config = {
        "head_dim": dim,
        "rms_norm_eps": own["attention.layer_norm_rms_epsilon"],
        "rope_theta": own["rope.freq_base"],
        "rope_scaling": {"rope_type": "divided", "divisors": divisors} if divisors is not None else None,
        "draft_vocab_size": len(named["lm_head.weight"]),
        "norm_before_residual": own["norm_before_residual"],
        "norm_output": False,
        "fc_norm": False,
    }
    if "d2t" in stored:
        named["d2t"] = stored["d2t"] - torch.arange(len(stored["d2t"]))
    return Eagle3(config, named, probe.embed_tokens).draft_logits(probe)
