"""Decoder layers of drafters, and how they may start.

Shape letters: R = rows, H = query heads, G = key/value heads, E = head dimension, D = hidden size.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from data.decoder import norm_scale
from train.drafters.flops import attention_flops, linear_flops
from train.drafters.layers import RMSNorm, feed_forward, product_dtype, rotate

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""query (H, Q, E), keys (G, R, E), values (G, R, E) of the rows at hand -> (H, Q, E)."""


def compile_layer(layer: nn.Module) -> None:
    """Let torch.compile fuse the layer's own forward: hooks of an engine (ZeRO-3's gathering) stay outside."""
    layer.forward = torch.compile(layer.forward, dynamic=True)


class DraftLayer(nn.Module):
    """A Llama layer whose attention may read wider rows than its residual stream. Names as engines know them."""

    def __init__(self, shape: LlamaConfig, read_width: int, qk_norm: bool = False) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = shape.num_attention_heads, shape.num_key_value_heads
        self.head_dim: int = shape.head_dim
        width = shape.hidden_size
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(read_width, self.num_heads * self.head_dim, bias=False),
                "k_proj": nn.Linear(read_width, self.num_kv_heads * self.head_dim, bias=False),
                "v_proj": nn.Linear(read_width, self.num_kv_heads * self.head_dim, bias=False),
                "o_proj": nn.Linear(self.num_heads * self.head_dim, width, bias=False),
            }
        )
        self.qk_norm = qk_norm
        if qk_norm:
            self.self_attn["q_norm"] = RMSNorm(self.head_dim, shape.rms_norm_eps)
            self.self_attn["k_norm"] = RMSNorm(self.head_dim, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(width, shape.rms_norm_eps)
        self.mlp = feed_forward(shape)

    def run(
        self, read: Tensor, residual: Tensor, table: tuple[Tensor, Tensor], attend: Attend, queries: Tensor | None
    ) -> Tensor:
        """One pass of the layer.

        Args:
            read: (R, read_width), what queries, keys and values are made of.
            residual: (R, D), the residual stream.
            table: cos and sin of the rows' positions.
            attend: the attention.
            queries: (Q,) the rows whose output is wanted; the others give keys and values only. None: all.

        Returns:
            (Q, D) output stream, before the final norm.
        """
        dtype = product_dtype(read)
        keys = rotate(self._normed("k_norm", self._heads(self.self_attn["k_proj"](read), self.num_kv_heads)), table)
        values = self._heads(self.self_attn["v_proj"](read), self.num_kv_heads)
        if queries is not None:
            read, residual = (rows.index_select(0, queries) for rows in (read, residual))
            table = (table[0].index_select(1, queries), table[1].index_select(1, queries))
        query = rotate(self._normed("q_norm", self._heads(self.self_attn["q_proj"](read), self.num_heads)), table)
        mixed = attend(query, keys, values).transpose(0, 1).flatten(1)  # (R, H * E)
        stream = residual + self.self_attn["o_proj"](mixed)
        output: Tensor = stream + self.mlp(self.post_attention_layernorm(stream).to(dtype))
        return output

    def flops(self, key_rows: int, query_rows: int, pairs: int) -> int:
        """Training FLOPs of `query_rows` outputs over `key_rows` keys and values, that look at `pairs` of them."""
        rows = {"k_proj": key_rows, "v_proj": key_rows}
        linear = [(name, part) for name, part in self.named_modules() if isinstance(part, nn.Linear)]
        products = (linear_flops(part, rows.get(name.rpartition(".")[2], query_rows)) for name, part in linear)
        return sum(products) + attention_flops(pairs, self.num_heads * self.head_dim)

    def _normed(self, name: str, heads: Tensor) -> Tensor:
        """(heads, R, E) queries or keys, normalised per head where the layer does so, in their own dtype."""
        return self.self_attn[name](heads).to(heads.dtype) if self.qk_norm else heads

    def _heads(self, projected: Tensor, num_heads: int) -> Tensor:
        return projected.view(*projected.shape[:-1], num_heads, self.head_dim).transpose(0, 1)  # (heads, R, E)


class EagleLayer(DraftLayer):
    """EAGLE-3: the attention reads [embedding; feature] (`midlayer.*`)."""

    def __init__(self, shape: LlamaConfig, norm_before_residual: bool, qk_norm: bool = False) -> None:
        super().__init__(shape, 2 * shape.hidden_size, qk_norm)
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(
        self,
        embeds: Tensor,
        hidden: Tensor,
        table: tuple[Tensor, Tensor],
        attend: Attend,
        queries: Tensor | None = None,
    ) -> Tensor:
        """(R, D) token embeddings and (R, D) features -> (Q, D); see DraftLayer.run."""
        feature = self.hidden_norm(hidden)
        dtype = product_dtype(feature)
        both = torch.cat([self.input_layernorm(embeds).to(dtype), feature.to(dtype)], dim=-1)  # (R, 2D), in this order
        return self.run(both, feature if self.norm_before_residual else hidden, table, attend, queries)


class PlainLayer(DraftLayer):
    """A Llama layer as it is: the attention reads its normed input (EAGLE-1: its input as it is)."""

    def __init__(self, shape: LlamaConfig, input_norm: bool = True) -> None:
        super().__init__(shape, shape.hidden_size)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps) if input_norm else nn.Identity()

    def forward(
        self, hidden: Tensor, table: tuple[Tensor, Tensor], attend: Attend, queries: Tensor | None = None
    ) -> Tensor:
        """(R, D) -> (Q, D); see DraftLayer.run."""
        normed = self.input_layernorm(hidden)
        return self.run(normed.to(product_dtype(normed)), hidden, table, attend, queries)


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """Low, middle and high layer of EAGLE-3 as indices into HF `hidden_states`; vLLM's default."""
    return (2, num_layers // 2, num_layers - 3)


@torch.no_grad()
def copy_target_layer(layer: DraftLayer, fc: nn.Linear, source: nn.Module) -> None:
    """Start the drafter as a copy of one target layer that reads the last D columns of `fc`'s input as they are.

    The embedding half of EAGLE's q, k, v and the other columns of fc start at zero: they are learned. Biases on queries
    and keys (Qwen2) have no place in the layer that engines serve and are left out, and so are norms on them (Qwen3)
    unless the drafter has such norms; where only the drafter has them, they start at 1.

    Raises:
        ValueError: if `source` has no dense Llama-style attention and feed-forward of the drafter's shape.
    """
    theirs = source.state_dict()
    width = fc.out_features
    renamed = {"hidden_norm.weight": "input_layernorm.weight", "input_layernorm.weight": None}
    for name, parameter in layer.named_parameters():
        wanted = renamed.get(name, name) if isinstance(layer, EagleLayer) else name
        if wanted is None or (wanted not in theirs and wanted.endswith(("q_norm.weight", "k_norm.weight"))):
            continue
        if wanted not in theirs or theirs[wanted].shape[0] != parameter.shape[0]:
            raise ValueError(
                f"drafter.init_layer: the target layer has no {wanted} of the drafter's shape; set it to null"
            )
        if parameter.dim() == 2 and parameter.shape[1] == 2 * theirs[wanted].shape[1]:
            parameter[:, :width] = 0
            parameter[:, width:] = theirs[wanted]
        elif parameter.dim() == 1:
            parameter.copy_(norm_scale(source.get_submodule(wanted.removesuffix(".weight"))))
        else:
            parameter.copy_(theirs[wanted])
    fc.weight.zero_()
    fc.weight[:, -width:].copy_(torch.eye(width))


@torch.no_grad()
def silence(layer: DraftLayer) -> None:
    """Let the layer add nothing to its residual stream, until it is trained."""
    for name, parameter in layer.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.zero_()


def start_from_target(layer: DraftLayer, fc: nn.Linear, layers: nn.ModuleList, index: int) -> None:
    """`copy_target_layer` from the target's layer `index`, which counts from the end where it is negative.

    Raises:
        ValueError: if there is no such layer, or it does not fit.
    """
    if not -len(layers) <= index < len(layers):
        raise ValueError(f"drafter.init_layer={index}: the target has {len(layers)} layers")
    copy_target_layer(layer, fc, layers[index])
