"""EAGLE-1 from its folder: no norm before the attention, none before the LM head, which is the target's."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from conf.records import read_json, read_safetensors
from serve_export.readers.layer import Probe, Shape, angles, attention, feed_forward


def read(folder: Path, probe: Probe) -> Tensor:
    """(K, V) draft logits."""
    shape = Shape.of(read_json(folder / "config.json"))
    stored = read_safetensors(folder / "model.safetensors", load_file)
    w = {name: tensor.float() for name, tensor in stored.items()}
    hidden, ids = probe.last_hidden_state, probe.ids[1:]
    logits: list[Tensor] = []
    for _ in range(probe.num_draft_tokens):
        joined = torch.cat([probe.embed_tokens[ids], hidden], dim=-1) @ w["fc.weight"].T + w.get("fc.bias", 0.0)
        turn = angles(shape.rope, shape.head_dim, len(joined))
        stream = joined + attention(joined, w, "layers.0.self_attn", shape, turn)
        stream = stream + feed_forward(stream, w, "layers.0", shape.rms_norm_eps)
        logits.append(stream[-1:] @ probe.lm_head.T)
        hidden = torch.cat([hidden, stream[-1:]])
        ids = torch.cat([ids, logits[-1].argmax(dim=-1)])
    return torch.cat(logits)
