"""SmolLM2 written as a MiMo model: the same function, with an MTP layer beside it."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.wheel_target import smollm2_folder

BESIDE = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
          "generation_config.json")  # fmt: skip


def save_mimo(folder: Path) -> Path:
    """Write the folder; the MTP layer starts silent: it says of the next token what the target says of this one."""
    source = smollm2_folder()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in BESIDE:
        if (source / name).exists():
            shutil.copy2(source / name, folder / name)
    tensors: dict[str, Tensor] = {}
    for file in source.glob("*.safetensors"):
        tensors |= load_file(file)
    config = json.loads((source / "config.json").read_text())
    width, layers = config["hidden_size"], config["num_hidden_layers"]
    for layer in range(layers):  # Qwen2's layers have biases on q, k and v
        for name in "qkv":
            place = f"model.layers.{layer}.self_attn.{name}_proj"
            weight = tensors[f"{place}.weight"]
            tensors[f"{place}.bias"] = weight.new_zeros(len(weight))
    last, ours = f"model.layers.{layers - 1}.", "model.mtp_layers.0."
    layer = {name.replace(last, ours): part.clone() for name, part in tensors.items() if name.startswith(last)}
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        layer[ours + name] = torch.zeros_like(layer[ours + name])
    norm = tensors["model.norm.weight"]
    around = {
        "token_layernorm.weight": torch.ones_like(norm),
        "hidden_layernorm.weight": torch.ones_like(norm),
        "final_layernorm.weight": norm.clone(),
        "input_proj.weight": torch.cat([torch.eye(width), torch.zeros(width, width)], dim=1).to(norm.dtype),
    }
    tensors |= layer | {ours + name: part for name, part in around.items()}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    config |= {
        "architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1,
        "attention_bias": True, "use_sliding_window": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder
