"""Building blocks of drafter heads: norms, rotary positions, feed-forward.

Shape letters: R = rows, H = query heads, G = key/value heads, E = head dimension, D = hidden size.
"""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding, rotate_half


def llama_shape(target: PretrainedConfig) -> LlamaConfig:
    """The shape of one dense Llama layer beside `target`: engines serve drafters of this kind for every target.

    Where the target has no such thing (GPT-2: no rotary positions, no RMSNorm), the layer takes Llama's usual one; of
    several kinds of rotary positions (Gemma 3) it takes that of full attention.

    Raises:
        ValueError: if the target's positions differ from layer to layer in another way.
    """
    known = target.to_dict() | {name: getattr(target, name) for name in target.attribute_map}
    heads, width = target.num_attention_heads, target.hidden_size
    rope = known.get("rope_parameters") or {"rope_type": "default", "rope_theta": 10_000.0}
    rope = dict(rope.get("full_attention") or rope)
    if "rope_type" not in rope:
        raise ValueError(f"targets with several kinds of rotary positions ({', '.join(rope)}) are not supported yet")
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=width,
        intermediate_size=known.get("intermediate_size") or 4 * width,
        num_hidden_layers=target.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=known.get("num_key_value_heads") or heads,
        head_dim=known.get("head_dim") or width // heads,
        hidden_act=known.get("hidden_act") or known.get("hidden_activation") or "silu",
        rms_norm_eps=known.get("rms_norm_eps") or 1e-6,
        max_position_embeddings=target.max_position_embeddings,
        rope_parameters=rope,
    )


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm in its weight's precision: with mixed ones (autocast) torch leaves the fused kernel and warns."""

    def forward(self, states: Tensor) -> Tensor:
        """(..., D) -> (..., D) in the weight's dtype."""
        normed: Tensor = super().forward(states.to(self.weight.dtype))
        return normed


def product_dtype(states: Tensor) -> torch.dtype:
    """The dtype of matrix products with `states`: autocast's, where it is on. Who casts the input of several products
    to it does so once; autocast would do it for each, forward and backward."""
    device = states.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype


class Rotary:
    """Rotary position embedding with the target's base and scaling (all of transformers' rope types).

    No nn.Module on purpose: `drafter.to(torch.bfloat16)` must not round the frequencies.
    """

    def __init__(self, config: LlamaConfig) -> None:
        self.embedding = LlamaRotaryEmbedding(config)

    def table(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of `positions` (R,), each (1, R, E) float32."""
        self.embedding.to(positions.device)
        reference = torch.empty(0, dtype=torch.float32, device=positions.device)
        cos, sin = self.embedding(reference, positions[None])
        return cos, sin


def rotate(states: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary positions to (heads, R, E) queries or keys, in their own dtype."""
    cos, sin = (part.to(states.dtype) for part in table)
    rotated: Tensor = states * cos + rotate_half(states) * sin
    return rotated


def feed_forward(config: LlamaConfig) -> nn.Module:
    """SwiGLU block of the shape in `config` (hidden_size, intermediate_size, hidden_act)."""
    block: nn.Module = LlamaMLP(config)
    return block
