"""Building blocks of drafter heads: rotary positions, feed-forward, and the attention of training-time test.

Attention of step k (EAGLE-3, arXiv:2503.01840, section 3): row t attends to the step-0 keys of rows <= t in its
document and to its own keys of steps 1..k. That is one causal block plus k diagonals. Softmax over the union is exact
without ever forming a (rows, steps * rows) matrix: the causal block is computed by a flash kernel that also returns
its log-sum-exp, each diagonal is one dot product per row, and the parts are merged by their log-sum-exps.

Shape letters: R = flattened rows (B * T), H = query heads, G = key/value heads, E = head dimension, D = hidden size,
k = earlier draft steps.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding, rotate_half

Spans = list[tuple[int, int]]
"""[start, end) of each document in the flattened rows."""


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


class _FlashTTT(torch.autograd.Function):
    """Exact merged attention with the CPU flash kernel; see the module's docstring.

    The backward pass calls the kernel's own backward with the *merged* output and log-sum-exp: it needs only
    P = exp(score - lse) and D = sum(grad * out), which are those of the whole softmax. The kernel is causal over whole
    documents: rows that ask nothing take part with query 0 and gradient 0, which adds nothing to any gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, keys: Tensor, values: Tensor, rows: Tensor, spans: Spans, *diagonals: Tensor
    ) -> Tensor:
        scale = query.shape[-1] ** -0.5
        num_rows = keys.shape[1]
        spread = _spread(query, rows, num_rows)
        out = torch.zeros_like(spread)  # (H, R, E)
        lse = query.new_zeros(spread.shape[:2], dtype=_accumulator(query.dtype))  # (H, R)
        for start, end in spans:
            inside = slice(start, end)
            part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                spread[None, :, inside], keys[None, :, inside], values[None, :, inside], 0.0, True, scale=scale
            )
            out[:, inside], lse[:, inside] = part[0], part_lse[0]
        out, lse = _gather(out, rows), _gather(lse, rows)
        num_steps = len(diagonals) // 2
        if num_steps:
            own_keys, own_values = diagonals[:num_steps], diagonals[num_steps:]
            scores = [_dot(query, key) * scale for key in own_keys]
            merged = torch.stack([lse, *scores]).logsumexp(dim=0)
            out *= (lse - merged).exp().to(out.dtype)[..., None]
            for score, value in zip(scores, own_values, strict=True):
                out += (score - merged).exp().to(out.dtype)[..., None] * value
            lse = merged
        ctx.save_for_backward(query, keys, values, rows, out, lse, *diagonals)
        ctx.spans, ctx.scale = spans, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, rows, out, lse, *diagonals = ctx.saved_tensors
        grad = gradients[0].contiguous()
        grad_spread, grad_keys, grad_values = torch.zeros_like(keys), torch.zeros_like(keys), torch.zeros_like(values)
        spread = [_spread(tensor, rows, keys.shape[1]) for tensor in (grad, query, out, lse)]
        for start, end in ctx.spans:
            inside = slice(start, end)
            part_grad, part_query, part_out, part_lse = (tensor[None, :, inside] for tensor in spread)
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                part_grad, part_query, keys[None, :, inside], values[None, :, inside],
                part_out, part_lse, 0.0, True, scale=ctx.scale,
            )  # fmt: skip
            grad_spread[:, inside], grad_keys[:, inside], grad_values[:, inside] = (part[0] for part in parts)
        grad_query = _gather(grad_spread, rows)
        num_steps = len(diagonals) // 2
        total = _dot(grad, out)  # D of the flash backward
        diagonal_gradients: list[Tensor] = []
        value_gradients: list[Tensor] = []
        for key, value in zip(diagonals[:num_steps], diagonals[num_steps:], strict=True):
            probability = (_dot(query, key) * ctx.scale - lse).exp()
            score_gradient = probability * (_dot(grad, value) - total) * ctx.scale
            score_gradient = score_gradient.to(query.dtype)[..., None]
            grad_query += score_gradient * key
            diagonal_gradients.append(score_gradient * query)
            value_gradients.append(probability.to(query.dtype)[..., None] * grad)
        return (grad_query, grad_keys, grad_values, None, None, *diagonal_gradients, *value_gradients)


def ttt_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    own_keys: list[Tensor],
    own_values: list[Tensor],
    rows: Tensor,
    spans: Spans,
) -> Tensor:
    """Attention of one training-time-test step.

    Args:
        query: (H, Q, E), rotated, of this step. H is a multiple of G.
        keys: (G, R, E), rotated, of step 0.
        values: (G, R, E), of step 0.
        own_keys: keys (G, Q, E) of steps 1..k of the querying rows, this step last; empty at step 0.
        own_values: their values.
        rows: (Q,) int64 ascending, the querying rows.
        spans: the documents; rows outside all of them get arbitrary values.

    Returns:
        (H, Q, E).
    """
    repeats = query.shape[0] // keys.shape[0]
    keys, values = (tensor.repeat_interleave(repeats, dim=0) for tensor in (keys, values))
    diagonals = [tensor.repeat_interleave(repeats, dim=0) for tensor in (*own_keys, *own_values)]
    if query.device.type == "cpu":
        attended: Tensor = _FlashTTT.apply(  # type: ignore[no-untyped-call]
            query, keys, values, rows, spans, *diagonals
        )
        return attended
    return _plain_ttt_attention(query, keys, values, diagonals, rows, spans)


def _plain_ttt_attention(
    query: Tensor, keys: Tensor, values: Tensor, diagonals: list[Tensor], rows: Tensor, spans: Spans
) -> Tensor:
    """The same with plain operations, document by document: the reference of the fast path, and other devices' path."""
    num_steps = len(diagonals) // 2
    scale = query.shape[-1] ** -0.5
    dtype = _accumulator(query.dtype)
    out = torch.zeros_like(query)
    borders = torch.searchsorted(rows, torch.tensor(spans, device=rows.device)).tolist()
    for (start, end), (first, last) in zip(spans, borders, strict=True):
        chosen = slice(first, last)
        scores = query[:, chosen].to(dtype) @ keys[:, start:end].to(dtype).transpose(1, 2) * scale  # (H, q, length)
        future = torch.arange(start, end, device=rows.device) > rows[chosen, None]  # (q, length)
        scores = scores.masked_fill(future, float("-inf"))
        own = [_dot(query[:, chosen], key[:, chosen]) * scale for key in diagonals[:num_steps]]
        probs = torch.cat([scores, *(score[..., None] for score in own)], dim=-1).softmax(dim=-1)
        mixed = probs[..., : end - start] @ values[:, start:end].to(dtype)
        for step, value in enumerate(diagonals[num_steps:]):
            mixed = mixed + probs[..., end - start + step, None] * value[:, chosen].to(dtype)
        out[:, chosen] = mixed.to(out.dtype)
    return out


def _spread(tensor: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """(H, Q, ...) -> (H, R, ...), zero in rows that are not named."""
    if len(rows) == num_rows:
        return tensor
    wide = tensor.new_zeros(num_rows, tensor.shape[0], *tensor.shape[2:])  # rows first: whole rows are copied
    return wide.index_copy_(0, rows, tensor.transpose(0, 1)).transpose(0, 1)


def _gather(tensor: Tensor, rows: Tensor) -> Tensor:
    """(H, R, ...) -> (H, Q, ...)."""
    if len(rows) == tensor.shape[1]:
        return tensor
    return tensor.transpose(0, 1).index_select(0, rows).transpose(0, 1)


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    """Softmax statistics are kept in float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _dot(left: Tensor, right: Tensor) -> Tensor:
    """(H, R, E) x (H, R, E) -> (H, R) row-wise dot products."""
    return (left * right).sum(-1, dtype=_accumulator(left.dtype))
