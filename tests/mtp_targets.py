"""Tiny random targets whose folder has an MTP layer, under the names that its family uses."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.conftest import save_tiny_model

LAYERS, WIDTH = 3, 32
SHAPES: dict[str, dict[str, Any]] = {
    "glm4_moe": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "n_shared_experts": 1,
    },
    "deepseek_v3": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "n_shared_experts": 1, "num_key_value_heads": 4, "q_lora_rank": 16,
        "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 4,
    },
    "mimo": {},
    "qwen3_5_text": {"layer_types": ["full_attention"] * (LAYERS + 1)},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"] * 2},
}  # fmt: skip
OF_QWEN = ("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "fc.weight", "norm.weight")
AROUND = {
    "glm4_moe": ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"),
    "mimo": ("token_layernorm.weight", "hidden_layernorm.weight", "input_proj.weight", "final_layernorm.weight"),
    "qwen3_5_text": OF_QWEN,
    "qwen3_next": OF_QWEN,
}
Mtp = dict[str, Tensor]


def save_mtp_target(folder: Path, family: str) -> Mtp:
    """Write the folder; returns the MTP layer's tensors as they stand there."""
    # One layer more than the target has: the last becomes the MTP layer.
    save_tiny_model(folder, family, num_hidden_layers=LAYERS + 1, **SHAPES[family])
    tensors = load_file(folder / "model.safetensors")
    last = f"model.layers.{LAYERS}."
    qwen = family.startswith("qwen")
    names = AROUND.get(family, AROUND["glm4_moe"])
    generator = torch.Generator().manual_seed(1)
    norms = [torch.rand(WIDTH, generator=generator) + 0.5 for _ in range(3)]
    projection = 0.2 * torch.randn(WIDTH, 2 * WIDTH, generator=generator)
    place = "mtp." if qwen else {"mimo": "model.mtp_layers.0."}.get(family, last)
    mtp = {place + name: part for name, part in zip(names, (*norms[:2], projection, norms[2]), strict=True)}
    block = "mtp.layers.0." if qwen else place
    mtp |= {name.replace(last, block): part for name, part in tensors.items() if name.startswith(last)}
    kept = {name: part for name, part in tensors.items() if not name.startswith(last)}
    save_file(kept | mtp, str(folder / "model.safetensors"), metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    config |= {"layer_types": config["layer_types"][:LAYERS]} if config.get("layer_types") else {}
    (folder / "config.json").write_text(json.dumps(config))
    return mtp
