"""The contracts, one table per format: written from what the engines' loaders read, not from our writers."""

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from serve_export.contract import ABSENT, Shape, Table
from serve_export.source import Known


def _rope(shape: dict[str, Any]) -> dict[str, Any]:
    rope = shape["rope_parameters"]
    scaling = None if rope["rope_type"] == "default" else {k: v for k, v in rope.items() if k != "rope_theta"}
    return {"rope_theta": rope["rope_theta"], "rope_scaling": scaling, "rope_parameters": rope}


def _layer(known: Known) -> dict[str, Any]:
    """The keys of one Llama layer of the target's shape, V among them and never Vd."""
    copied = {key: value for key, value in known.shape.items() if key not in ("num_hidden_layers", "rope_parameters")}
    stated = {
        "model_type": "llama", "num_hidden_layers": 1, "tie_word_embeddings": False, "attention_bias": False,
        "mlp_bias": False, "dtype": known.dtype, "torch_dtype": known.dtype,
    }  # fmt: skip
    return copied | _rope(known.shape) | stated


def _layer_tensors(known: Known, prefix: str, read_width: int) -> dict[str, Shape]:
    shape = known.shape
    width, inner, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * dim, shape["num_key_value_heads"] * dim
    return {
        f"{prefix}.self_attn.q_proj.weight": (queries, read_width),
        f"{prefix}.self_attn.k_proj.weight": (keys, read_width),
        f"{prefix}.self_attn.v_proj.weight": (keys, read_width),
        f"{prefix}.self_attn.o_proj.weight": (width, queries),
        f"{prefix}.mlp.gate_proj.weight": (inner, width),
        f"{prefix}.mlp.up_proj.weight": (inner, width),
        f"{prefix}.mlp.down_proj.weight": (width, inner),
        f"{prefix}.post_attention_layernorm.weight": (width,),
    }


# --- EAGLE-3 ---------------------------------------------------------------------------------------------------------


def _eagle3_switches(known: Known) -> dict[str, Any]:
    """Without these, engines load the head and compute something else: their defaults differ."""
    facts = known.facts
    return {
        "draft_vocab_size": known.draft_vocab_size,
        "target_hidden_size": known.shape["hidden_size"],
        "norm_before_residual": facts["norm_before_residual"],
        "norm_before_fc": False,
        "fc_norm": facts["fc_norm"],
        "norm_output": facts["norm_output"],
        "eagle_aux_hidden_state_layer_ids": facts["aux_layers"],
    }


def _eagle3_keys(known: Known) -> dict[str, Any]:
    layers, normed = known.facts["aux_layers"], known.facts["qk_norm"]
    return _layer(known) | _eagle3_switches(known) | {
        "architectures": ["Eagle3Qwen3ForCausalLM" if normed else "LlamaForCausalLMEagle3"],
        "model_type": "qwen3" if normed else "llama",
        "bias": False,
        "num_aux_hidden_states": len(layers),
        "eagle_config.eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers],
        "eagle_config.use_aux_hidden_state": True,
    }  # fmt: skip


def _eagle3_tensors(known: Known, layer: str = "midlayer") -> dict[str, Shape]:
    width, dim, num_aux = known.shape["hidden_size"], known.shape["head_dim"], len(known.facts["aux_layers"])
    normed = (f"{layer}.self_attn.q_norm.weight", f"{layer}.self_attn.k_norm.weight")
    return {
        **_layer_tensors(known, layer, 2 * width),
        f"{layer}.input_layernorm.weight": (width,),
        f"{layer}.hidden_norm.weight": (width,),
        "fc.weight": (width, num_aux * width),
        "norm.weight": (width,),
        "lm_head.weight": (known.draft_vocab_size, width),
        **({f"fc_norm.{j}.weight": (width,) for j in range(num_aux)} if known.facts["fc_norm"] else {}),
        **(dict.fromkeys(normed, (dim,)) if known.facts["qk_norm"] else {}),
    }


def _speculators_keys(known: Known) -> dict[str, Any]:
    model_type = "qwen3" if known.facts["qk_norm"] else "llama"
    inner = _layer(known) | {"model_type": model_type, "num_aux_hidden_states": len(known.facts["aux_layers"])}
    return {f"transformer_layer_config.{key}": value for key, value in inner.items()} | _eagle3_switches(known) | {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config.algorithm": "eagle3",
        "speculators_config.default_proposal_method": "greedy",
        "speculators_config.proposal_methods": [
            {
                "proposal_type": "greedy", "speculative_tokens": known.num_draft_tokens, "verifier_accept_k": 1,
                "accept_tolerance": 0.0,
            }
        ],
        "speculators_config.verifier.name_or_path": known.target,
        "speculators_config.verifier.architectures": [known.target_architecture],
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": known.dtype,
        "dtype": known.dtype,
    }  # fmt: skip


def _speculators_tensors(known: Known) -> dict[str, Shape]:
    embedding = (known.shape["vocab_size"], known.shape["hidden_size"])
    return {**_eagle3_tensors(known, "layers.0"), "embed_tokens.weight": embedding}


# --- EAGLE-1 ---------------------------------------------------------------------------------------------------------


def _eagle1_keys(known: Known) -> dict[str, Any]:
    return {**_layer(known), "architectures": ["LlamaForCausalLM"], "draft_vocab_size": ABSENT, "bias": False}


def _eagle1_sglang_keys(known: Known) -> dict[str, Any]:
    return {**_layer(known), "architectures": ["LlamaForCausalLMEagle"], "draft_vocab_size": ABSENT, "bias": True}


def _eagle1_tensors(known: Known) -> dict[str, Shape]:
    width = known.shape["hidden_size"]
    return {**_layer_tensors(known, "layers.0", width), "fc.weight": (width, 2 * width)}


def _eagle1_sglang_tensors(known: Known) -> dict[str, Shape]:
    return {**_eagle1_tensors(known), "fc.bias": (known.shape["hidden_size"],)}


# --- Medusa ----------------------------------------------------------------------------------------------------------


def _medusa_keys(known: Known) -> dict[str, Any]:
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": known.shape["hidden_size"],
        "vocab_size": known.shape["vocab_size"],
        "num_heads": known.facts["num_heads"],
        "num_hidden_layers": known.facts["num_layers"],
        "medusa_fc_bias": True,
        "original_lm_head": not known.facts["own_lm_heads"],
        "num_attention_heads": ABSENT,  # vLLM would take it for num_heads
        "num_key_value_heads": ABSENT,
        "truncated_vocab_size": ABSENT,
        "torch_dtype": known.dtype,
        "dtype": known.dtype,
    }


def _medusa_tensors(known: Known) -> dict[str, Shape]:
    width, facts = known.shape["hidden_size"], known.facts
    blocks: dict[str, Shape] = {}
    for head in range(facts["num_heads"]):
        for layer in range(facts["num_layers"]):
            name = f"blocks.{head}.layers.{layer}"
            blocks |= {f"{name}.weight": (width, width), f"{name}.bias": (width,)}
    lm_heads = range(facts["num_heads"] if facts["own_lm_heads"] else 1)
    return blocks | {f"lm_heads.{head}.weight": (known.shape["vocab_size"], width) for head in lm_heads}


def _medusa_original_keys(known: Known) -> dict[str, Any]:
    return {
        "architectures": ABSENT,  # TGI would take the folder for a model
        "model_type": ABSENT,
        "base_model_name_or_path": known.target,
        "medusa_num_heads": known.facts["num_heads"],
        "medusa_num_layers": known.facts["num_layers"],
        "medusa_fc_bias": True,
        "hidden_size": known.shape["hidden_size"],
        "vocab_size": known.shape["vocab_size"],
        "torch_dtype": known.dtype,
    }


def _medusa_tgi_tensors(known: Known) -> dict[str, Shape]:
    return _medusa_original_tensors(known, known.facts["own_lm_heads"])


def _medusa_original_tensors(known: Known, lm_heads: bool = True) -> dict[str, Shape]:
    width, facts = known.shape["hidden_size"], known.facts
    found: dict[str, Shape] = {}
    for head in range(facts["num_heads"]):
        for layer in range(facts["num_layers"]):
            found |= {f"{head}.{layer}.linear.weight": (width, width), f"{head}.{layer}.linear.bias": (width,)}
        if lm_heads:
            found[f"{head}.{facts['num_layers']}.weight"] = (known.shape["vocab_size"], width)
    return found


# --- draft models ----------------------------------------------------------------------------------------------------


def _causal_lm_keys(known: Known) -> dict[str, Any]:
    stated = {key: value for key, value in known.facts["model"].items() if key not in ("dtype", "torch_dtype")}
    rope = stated.get("rope_parameters")
    legacy = _rope({"rope_parameters": rope}) if rope and "rope_theta" in rope else {}
    return stated | legacy | {"torch_dtype": known.dtype, "dtype": known.dtype}


def _causal_lm_tensors(known: Known) -> dict[str, Shape]:
    config = AutoConfig.for_model(**known.facts["model"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    state: dict[str, Tensor] = model.state_dict()
    if config.tie_word_embeddings:
        state.pop("lm_head.weight")
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


TABLES = {
    "eagle3": Table("vLLM 0.32, SGLang 0.5.23, TensorRT-LLM 1.3", _eagle3_keys, _eagle3_tensors, has_map=True),
    "eagle3-speculators": Table("speculators 0.9, vLLM 0.32", _speculators_keys, _speculators_tensors, has_map=True),
    "eagle1": Table("vLLM 0.32", _eagle1_keys, _eagle1_tensors),
    "eagle1-sglang": Table("SGLang 0.5.23", _eagle1_sglang_keys, _eagle1_sglang_tensors),
    "medusa": Table("vLLM 0.32", _medusa_keys, _medusa_tensors),
    "medusa-tgi": Table("TGI 3", _medusa_original_keys, _medusa_tgi_tensors, "medusa_lm_head.safetensors"),
    "medusa-trtllm": Table(
        "TensorRT-LLM's engine builder", _medusa_original_keys, _medusa_original_tensors, "medusa_lm_head.safetensors"
    ),
    "causal-lm": Table(
        "transformers 5, vLLM 0.32, SGLang 0.5.23, TensorRT-LLM 1.3", _causal_lm_keys, _causal_lm_tensors
    ),
}
"""By the name of the format."""
