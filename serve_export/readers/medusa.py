"""Medusa from vLLM's folder and from that of its authors.

Head i is `head_i(x + silu(W_i x + b_i))`, x the target's last state after its final norm.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from conf.records import read_json, read_safetensors
from serve_export.readers.layer import Probe


def read(folder: Path, probe: Probe) -> Tensor:
    """(K, V) draft logits of vLLM's form."""
    config = read_json(folder / "config.json")
    stored = read_safetensors(folder / "model.safetensors", load_file)
    w = {name: tensor.float() for name, tensor in stored.items()}
    logits = []
    for head in range(probe.num_draft_tokens):
        hidden = probe.last_hidden_state[-1]
        for layer in range(config["num_hidden_layers"]):
            block = f"blocks.{head}.layers.{layer}"
            bias = w[f"{block}.bias"] if config["medusa_fc_bias"] else 0.0
            hidden = hidden + torch.nn.functional.silu(w[f"{block}.weight"] @ hidden + bias)
        logits.append(w[f"lm_heads.{0 if config['original_lm_head'] else head}.weight"] @ hidden)
    return torch.stack(logits)


def read_original(folder: Path, probe: Probe) -> Tensor:
    """(K, V) draft logits of the authors' form; without LM heads of its own it takes the target's."""
    depth = read_json(folder / "config.json")["medusa_num_layers"]
    stored = read_safetensors(folder / "medusa_lm_head.safetensors", load_file)
    w = {name: tensor.float() for name, tensor in stored.items()}
    logits = []
    for head in range(probe.num_draft_tokens):
        hidden = probe.last_hidden_state[-1]
        for layer in range(depth):
            block = f"{head}.{layer}.linear"
            hidden = hidden + torch.nn.functional.silu(w[f"{block}.weight"] @ hidden + w[f"{block}.bias"])
        logits.append(w.get(f"{head}.{depth}.weight", probe.lm_head) @ hidden)
    return torch.stack(logits)
