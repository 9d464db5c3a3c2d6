"""What an exported folder must hold, checked against the files alone: exact tensors, shapes, dtypes, config relations.

Engines do not check this: vLLM serves a head without `fc.weight` or `d2t` at zero acceptance, SGLang skips unknown
names. So every export is held against its contract before it gets its name.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from conf import InputError
from conf.records import read_json, read_safetensors

Shape = tuple[int, ...]
STATED = ("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc", "attention_bias", "mlp_bias")
"""Switches without which engines load the head and compute something else."""


def eagle3_tensors(config: dict[str, Any]) -> dict[str, tuple[Shape, torch.dtype]]:
    """Name -> (shape, dtype) of every tensor that a native EAGLE-3 folder with this config.json must hold."""
    width, target_width, inner = config["hidden_size"], config["target_hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    num_aux, draft_vocab, vocab = config["num_aux_hidden_states"], config["draft_vocab_size"], config["vocab_size"]
    shapes: dict[str, Shape] = {
        "fc.weight": (width, num_aux * target_width),
        "midlayer.input_layernorm.weight": (width,),
        "midlayer.hidden_norm.weight": (width,),
        "midlayer.post_attention_layernorm.weight": (width,),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * width),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * width),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * width),
        "midlayer.self_attn.o_proj.weight": (width, queries),
        "midlayer.mlp.gate_proj.weight": (inner, width),
        "midlayer.mlp.up_proj.weight": (inner, width),
        "midlayer.mlp.down_proj.weight": (width, inner),
        "norm.weight": (width,),
        "lm_head.weight": (draft_vocab, width),
    }
    if config["fc_norm"]:
        shapes |= {f"fc_norm.{j}.weight": (target_width,) for j in range(num_aux)}
    dtype = getattr(torch, config["dtype"])
    wanted = {name: (shape, dtype) for name, shape in shapes.items()}
    if draft_vocab < vocab:
        wanted |= {"d2t": ((draft_vocab,), torch.int64), "t2d": ((vocab,), torch.bool)}
    return wanted


def verify_folder(folder: Path, target_config: Any) -> None:
    """Hold an exported EAGLE-3 folder against its contract.

    Args:
        folder: with config.json and model.safetensors.
        target_config: the target's transformers configuration.

    Raises:
        InputError: naming the first fault.
    """
    config = read_json(folder / "config.json")
    tensors: dict[str, Tensor] = read_safetensors(folder / "model.safetensors", load_file)
    try:
        faults = [
            *_config_faults(config, target_config),
            *_tensor_faults(tensors, eagle3_tensors(config)),
            *_mapping_faults(tensors, config),
        ]
    except KeyError as error:
        raise InputError(f"{folder}/config.json lacks the key {error}") from error
    if faults:
        raise InputError(f"{folder} breaks the serving contract: {'; '.join(faults)}")


def _config_faults(config: dict[str, Any], target: Any) -> list[str]:
    top = config["eagle_aux_hidden_state_layer_ids"]
    nested = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    faults = []
    if nested != [layer - 1 for layer in top]:
        faults.append(f"nested layer ids {nested} must be the top-level ids {top} minus 1")
    if top != sorted(set(top)) or not all(1 <= layer < target.num_hidden_layers for layer in top):
        faults.append(f"layer ids {top} must ascend within 1..{target.num_hidden_layers - 1}")
    if len(top) != config["num_aux_hidden_states"]:
        faults.append(f"num_aux_hidden_states {config['num_aux_hidden_states']} but {len(top)} layer ids")
    rope = dict(target.rope_parameters)
    scaling = None if rope["rope_type"] == "default" else {k: v for k, v in rope.items() if k != "rope_theta"}
    if config["rope_theta"] != config["rope_parameters"]["rope_theta"]:
        faults.append("rope_theta and rope_parameters disagree")
    for key, wanted in {
        "vocab_size": target.vocab_size,
        "target_hidden_size": target.hidden_size,
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "rope_scaling": scaling,
        "hidden_act": target.hidden_act,
        "rms_norm_eps": target.rms_norm_eps,
        "max_position_embeddings": target.max_position_embeddings,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
    }.items():
        if config[key] != wanted:
            faults.append(f"{key} is {config[key]}, expected {wanted}")
    if config["torch_dtype"] != config["dtype"]:
        faults.append("torch_dtype and dtype disagree")
    faults += [
        f"{key} must be stated: engines differ in its default"
        for key in STATED
        if not isinstance(config.get(key), bool)
    ]
    return faults


def _tensor_faults(tensors: dict[str, Tensor], wanted: dict[str, tuple[Shape, torch.dtype]]) -> list[str]:
    faults = [f"missing tensor {name}" for name in sorted(wanted.keys() - tensors.keys())]
    faults += [f"unknown tensor {name}" for name in sorted(tensors.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & tensors.keys()):
        shape, dtype = wanted[name]
        tensor = tensors[name]
        if tuple(tensor.shape) != shape:
            faults.append(f"{name} has shape {list(tensor.shape)}, expected {list(shape)}")
        if tensor.dtype != dtype:
            faults.append(f"{name} is {tensor.dtype}, expected {dtype}")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            faults.append(f"{name} holds values that are not finite")
    return faults


def _mapping_faults(tensors: dict[str, Tensor], config: dict[str, Any]) -> list[str]:
    """d2t must be offsets to ascending, unique target ids, and agree with t2d."""
    if "d2t" not in tensors or "t2d" not in tensors:
        return []
    ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    faults = []
    if not bool((ids[1:] > ids[:-1]).all()):
        faults.append("d2t: draft id + offset must ascend strictly (absolute ids or zeros instead of offsets?)")
    if int(ids.min()) < 0 or int(ids.max()) >= config["vocab_size"]:
        faults.append(f"d2t: target ids must lie in 0..{config['vocab_size'] - 1}")
    elif not torch.equal(torch.nonzero(tensors["t2d"]).squeeze(1), ids):
        faults.append("t2d does not mark the ids that d2t maps to")
    return faults
