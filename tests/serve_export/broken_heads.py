"""EAGLE-3 heads that load and accept nothing, as public issues describe them: each fault alone, on a good export."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

IDS = "eagle_aux_hidden_state_layer_ids"
Tensors, Config = dict[str, Tensor], dict[str, Any]
Fault = Callable[[Tensors, Config], None]


def rewrite(folder: Path, fault: Fault) -> None:
    """Spoil a head where it is."""
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    fault(tensors, config)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(config))


def nested_only(tensors: Tensors, config: Config) -> None:
    del config[IDS], config["num_aux_hidden_states"]


def top_only(tensors: Tensors, config: Config) -> None:
    del config["eagle_config"], config["num_aux_hidden_states"]


def no_layer_ids(tensors: Tensors, config: Config) -> None:
    top_only(tensors, config)
    del config[IDS]


def one_list_copied(tensors: Tensors, config: Config) -> None:
    config["eagle_config"][IDS] = config[IDS]


def no_rope_theta(tensors: Tensors, config: Config) -> None:
    del config["rope_theta"], config["rope_scaling"]


def no_rope_at_all(tensors: Tensors, config: Config) -> None:
    no_rope_theta(tensors, config)
    del config["rope_parameters"]


def rope_scaling_lost(tensors: Tensors, config: Config) -> None:
    config["rope_scaling"], config["rope_parameters"] = None, {"rope_type": "default", "rope_theta": 10000.0}


def model_prefix(tensors: Tensors, config: Config) -> None:
    for name in [name for name in tensors if name not in ("d2t", "t2d")]:
        tensors[f"model.{name}"] = tensors.pop(name)


def absolute_d2t(tensors: Tensors, config: Config) -> None:
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def absolute_d2t_alone(tensors: Tensors, config: Config) -> None:
    absolute_d2t(tensors, config)
    del tensors["t2d"]


def zero_d2t(tensors: Tensors, config: Config) -> None:
    tensors["d2t"] = torch.zeros_like(tensors["d2t"])


def no_d2t(tensors: Tensors, config: Config) -> None:
    del tensors["d2t"]


def no_map(tensors: Tensors, config: Config) -> None:
    del tensors["d2t"], tensors["t2d"]


def no_lm_head(tensors: Tensors, config: Config) -> None:
    del tensors["lm_head.weight"]


def no_lm_head_and_absolute_ids(tensors: Tensors, config: Config) -> None:
    absolute_d2t_alone(tensors, config)
    no_lm_head(tensors, config)


def no_fc(tensors: Tensors, config: Config) -> None:
    del tensors["fc.weight"]


def draft_vocab_size_missing(tensors: Tensors, config: Config) -> None:
    del config["draft_vocab_size"]


def vocab_size_of_the_draft(tensors: Tensors, config: Config) -> None:
    config["vocab_size"] = config["draft_vocab_size"]


def verifier_tensors(tensors: Tensors, config: Config) -> None:
    tensors["verifier_norm.weight"] = torch.ones(32)
    tensors["verifier_lm_head.weight"] = torch.ones(50, 32)


def bias_on_fc(tensors: Tensors, config: Config) -> None:
    tensors["fc.bias"] = torch.ones(32)


def zero_bias_on_fc(tensors: Tensors, config: Config) -> None:
    tensors["fc.bias"] = torch.zeros(32)


def layers_0(tensors: Tensors, config: Config) -> None:
    for name in [name for name in tensors if name.startswith("midlayer.")]:
        tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)


def switches_unstated(tensors: Tensors, config: Config) -> None:
    for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "tie_word_embeddings"):
        del config[key]


BROKEN: list[tuple[Fault, str, bool]] = [
    (nested_only, "layer ids", True),  # vllm#43671, vllm#50170, SpecForge's and NVIDIA's heads
    (top_only, "layer ids", True),  # sglang#21274
    (no_layer_ids, "layer ids", True),  # vllm#50170
    (one_list_copied, "layer ids contradict each other", False),
    (no_rope_theta, "rotary positions", True),  # Automodel#2920, SpecForge#265
    (no_rope_at_all, "rotary positions", True),
    (rope_scaling_lost, "rotary positions", True),  # speculators#574
    (model_prefix, "model. prefix", True),
    (absolute_d2t, "absolute ids in d2t", True),  # verl-SpeCo#67
    (absolute_d2t_alone, "absolute ids in d2t", True),
    (zero_d2t, "d2t does not fit t2d", True),
    (no_d2t, "no d2t", True),  # Automodel#2447
    (no_map, "no d2t", False),
    (no_lm_head, "no lm_head", True),  # sglang#27908
    (no_lm_head_and_absolute_ids, "no lm_head, absolute ids in d2t", True),
    (no_fc, "no fc.weight", False),
    (draft_vocab_size_missing, "sizes", True),  # TensorRT-LLM#6492, EAGLE#214
    (vocab_size_of_the_draft, "sizes", True),
    (verifier_tensors, "verifier tensors", True),
    (bias_on_fc, "bias on fc", False),
    (zero_bias_on_fc, "bias on fc", True),
    (layers_0, "layer called layers.0", True),
    (switches_unstated, "unstated", True),  # vllm#38111, vllm#46488
]
"""Fault, its name in the diagnosis, whether it can be mended."""
