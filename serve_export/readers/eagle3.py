"""EAGLE-3 from its native folder, by the formulas that vLLM's `llama_eagle3` computes."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from conf.records import read_json, read_safetensors
from serve_export.readers.layer import Probe, Shape, Weights, angles, attention, feed_forward, rms

LAYER = "midlayer"


class Eagle3:
    """A head in float32."""

    def __init__(self, config: dict[str, Any], stored: dict[str, Tensor], embed_tokens: Tensor) -> None:
        """Take the parts.

        Args:
            config: native config.json.
            stored: native tensors.
            embed_tokens: (V, D), the target's, which engines share.
        """
        self.config, self.shape = config, Shape.of(config)
        self.weights: Weights = {name: tensor.float() for name, tensor in stored.items() if tensor.is_floating_point()}
        self.embed_tokens = embed_tokens
        draft_ids = torch.arange(config["draft_vocab_size"])
        self.target_ids = draft_ids + stored["d2t"] if "d2t" in stored else draft_ids

    def draft_logits(self, probe: Probe) -> Tensor:
        """(K, Vd) logits of greedy drafts after the probe, each conditioned on the argmax before it."""
        hidden, ids = self._fuse(probe.aux_hidden_states), probe.ids[1:]
        logits: list[Tensor] = []
        for _ in range(probe.num_draft_tokens):
            stream = self._layer(self.embed_tokens[ids], hidden)
            normed = rms(stream[-1:], self.weights["norm.weight"], self.shape.rms_norm_eps)
            logits.append(normed @ self.weights["lm_head.weight"].T)
            hidden = torch.cat([hidden, normed if self.config["norm_output"] else stream[-1:]])
            ids = torch.cat([ids, self.target_ids[logits[-1].argmax(dim=-1)]])
        return torch.cat(logits)

    def _fuse(self, states: Tensor) -> Tensor:
        if self.config["fc_norm"]:
            chunks = states.chunk(self.config["num_aux_hidden_states"], dim=-1)
            eps = self.shape.rms_norm_eps
            states = torch.cat(
                [rms(part, self.weights[f"fc_norm.{j}.weight"], eps) for j, part in enumerate(chunks)], -1
            )
        return states @ self.weights["fc.weight"].T

    def _layer(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        w, eps = self.weights, self.shape.rms_norm_eps
        feature = rms(hidden, w[f"{LAYER}.hidden_norm.weight"], eps)
        both = torch.cat([rms(embeds, w[f"{LAYER}.input_layernorm.weight"], eps), feature], dim=-1)
        turn = angles(self.shape.rope, self.shape.head_dim, len(both))
        residual = feature if self.config["norm_before_residual"] else hidden
        stream = residual + attention(both, w, f"{LAYER}.self_attn", self.shape, turn)
        return stream + feed_forward(stream, w, LAYER, eps)


def read(folder: Path, probe: Probe) -> Tensor:
    """(K, Vd) draft logits of a native folder."""
    stored = read_safetensors(folder / "model.safetensors", load_file)
    return Eagle3(read_json(folder / "config.json"), stored, probe.embed_tokens).draft_logits(probe)


def read_speculators(folder: Path, probe: Probe) -> Tensor:
    """(K, Vd) draft logits of a folder in the speculators library's format, which has an embedding of its own."""
    config = read_json(folder / "config.json")
    stored = read_safetensors(folder / "model.safetensors", load_file)
    layer = config["transformer_layer_config"]
    native = {**layer, **{key: config[key] for key in config if key != "transformer_layer_config"}}
    named = {name.replace("layers.0.", f"{LAYER}."): tensor for name, tensor in stored.items()}
    return Eagle3(native, named, stored["embed_tokens.weight"].float()).draft_logits(probe)
