"""What the readers share: the target's side of a draft, and one Llama layer in float32, without a cache."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Weights = dict[str, Tensor]
KNOWN_ROPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class Probe:
    """A text, and what the target made of it."""

    ids: Tensor
    """(N + 1,) int64."""
    aux_hidden_states: Tensor
    """(N, A * D) float32 of the first N tokens, side by side."""
    last_hidden_state: Tensor
    """(N, D) float32, after the target's final norm."""
    embed_tokens: Tensor
    """(V, D) float32, the target's."""
    lm_head: Tensor
    """(V, D) float32, the target's."""
    num_draft_tokens: int
    """K."""


@dataclass(frozen=True)
class Shape:
    """Of a layer, as its config.json states it."""

    head_dim: int
    rms_norm_eps: float
    rope: dict[str, Any]

    @classmethod
    def of(cls, config: dict[str, Any]) -> "Shape":
        """From the keys that every engine reads."""
        scaling = config["rope_scaling"] or {"rope_type": "default"}
        rope = {**scaling, "rope_theta": config["rope_theta"]}
        return cls(config["head_dim"], float(config["rms_norm_eps"]), rope)


def rms(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension."""
    scaled: Tensor = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + eps) * weight
    return scaled


def angles(rope: dict[str, Any], dim: int, length: int) -> Tensor:
    """(length, dim / 2) angle of each pair of dimensions at each position."""
    rates = [rope["rope_theta"] ** (-2 * pair / dim) for pair in range(dim // 2)]
    if rope["rope_type"] == "linear":
        rates = [rate / rope["factor"] for rate in rates]
    if rope["rope_type"] == "llama3":
        rates = [_llama3(rate, rope) for rate in rates]
    turn = torch.arange(length)[:, None] * torch.tensor(rates)
    return turn / rope["divisors"] if rope["rope_type"] == "divided" else turn  # llama.cpp's files have these


def _llama3(rate: float, rope: dict[str, Any]) -> float:
    """Llama 3.1: long waves are slowed down, short ones not, those between in part."""
    wave = 2 * math.pi / rate
    original, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    if wave > original / low:
        return float(rate / rope["factor"])
    if wave < original / high:
        return rate
    smooth = (original / wave - low) / (high - low)
    return float((1 - smooth) * rate / rope["factor"] + smooth * rate)


def attention(read: Tensor, w: Weights, prefix: str, shape: Shape, turn: Tensor) -> Tensor:
    """Causal attention of (N, *) rows -> (N, D). `turn`: (N, head_dim / 2) angles."""
    query, key, value = (
        (read @ w[f"{prefix}.{name}_proj.weight"].T).view(len(read), -1, shape.head_dim).transpose(0, 1)
        for name in "qkv"
    )
    if f"{prefix}.q_norm.weight" in w:
        query = rms(query, w[f"{prefix}.q_norm.weight"], shape.rms_norm_eps)
        key = rms(key, w[f"{prefix}.k_norm.weight"], shape.rms_norm_eps)
    query, key = _turned(query, turn), _turned(key, turn)
    groups = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    scores = query @ key.transpose(1, 2) / shape.head_dim**0.5
    scores = scores + torch.full(scores.shape[1:], float("-inf")).triu(1)
    mixed = (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)
    output: Tensor = mixed @ w[f"{prefix}.o_proj.weight"].T
    return output


def feed_forward(stream: Tensor, w: Weights, prefix: str, eps: float) -> Tensor:
    """(N, D) -> (N, D), its norm included and the residual not."""
    normed = rms(stream, w[f"{prefix}.post_attention_layernorm.weight"], eps)
    gate: Tensor = torch.nn.functional.silu(normed @ w[f"{prefix}.mlp.gate_proj.weight"].T)
    inner = gate * (normed @ w[f"{prefix}.mlp.up_proj.weight"].T)
    output: Tensor = inner @ w[f"{prefix}.mlp.down_proj.weight"].T
    return output


def _turned(states: Tensor, turn: Tensor) -> Tensor:
    """Rotate (heads, N, head_dim), each dimension with the one half a head after it."""
    left, right = states.chunk(2, dim=-1)
    cos, sin = turn.cos(), turn.sin()
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
