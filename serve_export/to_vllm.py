"""A drafter in vLLM's native checkpoint format: tensor names and config.json.

Facts that bite (each has a test):
- vLLM adds the `model.` prefix itself and fails on a file that has it.
- `d2t` holds offsets (target id = draft id + offset), and must be absent when the draft vocabulary is the whole one.
- Layer ids exist in two conventions. Ours and vLLM's top-level list count the state *entering* layer i; the nested
  list that SGLang reads counts the layer whose *output* it is, one less. Both are written.
- transformers 5 writes `rope_parameters` only, other engines read `rope_theta`; missing, it silently becomes 10000.
"""

import json
import shlex
from typing import Any

import torch
from torch import Tensor

from conf import InputError
from data.target import Target
from train.drafters.base import Servable

ARCHITECTURES = {"eagle3": "LlamaForCausalLMEagle3"}


def tensors(servable: Servable, vocab_size: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors under the names that vLLM loads, floats in `dtype`.

    Args:
        servable: the drafter.
        vocab_size: V of the target.
        dtype: to serve in.

    Raises:
        InputError: if this family has no form for vLLM.
    """
    _require_known(servable)
    ids = servable.tensors["draft_to_target_ids"].cpu()
    out = {
        name: tensor.detach().cpu().to(dtype).contiguous().clone()
        for name, tensor in servable.tensors.items()
        if name != "draft_to_target_ids"
    }
    if len(ids) < vocab_size:
        out["d2t"] = ids - torch.arange(len(ids))
        out["t2d"] = torch.isin(torch.arange(vocab_size), ids)
    return out


def config(servable: Servable, target: Target, dtype: str) -> dict[str, Any]:
    """config.json for vLLM, readable by SGLang, TensorRT-LLM and llama.cpp's converter where they support the head."""
    _require_known(servable)
    shape, facts = target.hf_config, servable.config
    aux_layers = facts["aux_layers"]
    draft_vocab_size = len(servable.tensors["draft_to_target_ids"])
    rope = dict(shape.rope_parameters)
    scaling = None if rope["rope_type"] == "default" else {k: v for k, v in rope.items() if k != "rope_theta"}
    eos = sorted(target.eos_token_ids)
    return {
        "architectures": [ARCHITECTURES[servable.architecture]],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "hidden_size": shape.hidden_size,
        "target_hidden_size": shape.hidden_size,
        "intermediate_size": servable.tensors["midlayer.mlp.gate_proj.weight"].shape[0],
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": facts["head_dim"],
        "hidden_act": shape.hidden_act,
        "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": scaling,
        "rope_parameters": rope,
        "attention_bias": False,
        "mlp_bias": False,
        "bias": False,
        "tie_word_embeddings": False,
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
        "bos_token_id": shape.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
        "torch_dtype": dtype,
        "dtype": dtype,
    }


def serve_command(target_path: str, folder: str, num_draft_tokens: int) -> str:
    """The shell command that serves the target with this head."""
    speculative = {"method": "eagle3", "model": folder, "num_speculative_tokens": num_draft_tokens}
    return shlex.join(["vllm", "serve", target_path, "--speculative-config", json.dumps(speculative)])


def _require_known(servable: Servable) -> None:
    if servable.architecture not in ARCHITECTURES:
        raise InputError(
            f"{servable.architecture} heads have no export for vLLM yet; {', '.join(sorted(ARCHITECTURES))} heads have"
        )
