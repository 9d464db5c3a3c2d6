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

    Raises:
        ValueError: if the target's positions differ from layer to layer.
    """
    rope = dict(target.rope_parameters)
    if "rope_type" not in rope:
        raise ValueError(f"targets with several kinds of rotary positions ({', '.join(rope)}) are not supported yet")
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_hidden_layers=target.num_hidden_layers,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads,
        hidden_act=target.hidden_act,
        rms_norm_eps=target.rms_norm_eps,
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
    P = exp(score - lse) and D = sum(grad * out), which are those of the whole softmax.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, keys: Tensor, values: Tensor, spans: Spans, *diagonals: Tensor) -> Tensor:
        scale = query.shape[-1] ** -0.5
        out = torch.zeros_like(query)  # (H, R, E)
        lse = query.new_zeros(query.shape[:2], dtype=_accumulator(query.dtype))  # (H, R)
        for start, end in spans:
            rows = slice(start, end)
            part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query[None, :, rows], keys[None, :, rows], values[None, :, rows], 0.0, True, scale=scale
            )
            out[:, rows], lse[:, rows] = part[0], part_lse[0]
        num_steps = len(diagonals) // 2
        if num_steps:
            own_keys, own_values = diagonals[:num_steps], diagonals[num_steps:]
            scores = [_dot(query, key) * scale for key in own_keys]
            merged = torch.stack([lse, *scores]).logsumexp(dim=0)
            out *= (lse - merged).exp().to(out.dtype)[..., None]
            for score, value in zip(scores, own_values, strict=True):
                out += (score - merged).exp().to(out.dtype)[..., None] * value
            lse = merged
        ctx.save_for_backward(query, keys, values, out, lse, *diagonals)
        ctx.spans, ctx.scale = spans, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, out, lse, *diagonals = ctx.saved_tensors
        grad = gradients[0].contiguous()
        grad_query, grad_keys, grad_values = (torch.zeros_like(tensor) for tensor in (query, keys, values))
        for start, end in ctx.spans:
            rows = slice(start, end)
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad[None, :, rows], query[None, :, rows], keys[None, :, rows], values[None, :, rows],
                out[None, :, rows], lse[None, :, rows], 0.0, True, scale=ctx.scale,
            )  # fmt: skip
            grad_query[:, rows], grad_keys[:, rows], grad_values[:, rows] = (part[0] for part in parts)
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
        return (grad_query, grad_keys, grad_values, None, *diagonal_gradients, *value_gradients)


def ttt_attention(
    query: Tensor, keys: Tensor, values: Tensor, own_keys: list[Tensor], own_values: list[Tensor], spans: Spans
) -> Tensor:
    """Attention of one training-time-test step.

    Args:
        query: (H, R, E), rotated, of this step.
        keys: (G, R, E), rotated, of step 0. H is a multiple of G.
        values: (G, R, E), of step 0.
        own_keys: keys (G, R, E) of steps 1..k, this step last; empty at step 0.
        own_values: their values.
        spans: the documents; rows outside all of them get arbitrary values.

    Returns:
        (H, R, E).
    """
    repeats = query.shape[0] // keys.shape[0]
    keys, values = (tensor.repeat_interleave(repeats, dim=0) for tensor in (keys, values))
    diagonals = [tensor.repeat_interleave(repeats, dim=0) for tensor in (*own_keys, *own_values)]
    if query.device.type == "cpu":
        attended: Tensor = _FlashTTT.apply(  # type: ignore[no-untyped-call]
            query, keys, values, spans, *diagonals
        )
        return attended
    return _plain_ttt_attention(query, keys, values, diagonals, spans)


def _plain_ttt_attention(query: Tensor, keys: Tensor, values: Tensor, diagonals: list[Tensor], spans: Spans) -> Tensor:
    """The same with plain operations, document by document: the reference of the fast path, and other devices' path."""
    num_steps = len(diagonals) // 2
    scale = query.shape[-1] ** -0.5
    out = torch.zeros_like(query)
    for start, end in spans:
        rows = slice(start, end)
        dtype = _accumulator(query.dtype)
        scores = query[:, rows].to(dtype) @ keys[:, rows].to(dtype).transpose(1, 2) * scale  # (H, length, length)
        future = torch.ones(end - start, end - start, dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
        own = [_dot(query[:, rows], key[:, rows]) * scale for key in diagonals[:num_steps]]
        probs = torch.cat([scores, *(score[..., None] for score in own)], dim=-1).softmax(dim=-1)
        mixed = probs[..., : end - start] @ values[:, rows].to(dtype)
        for step, value in enumerate(diagonals[num_steps:]):
            mixed = mixed + probs[..., end - start + step, None] * value[:, rows].to(dtype)
        out[:, rows] = mixed.to(out.dtype)
    return out


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    """Softmax statistics are kept in float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _dot(left: Tensor, right: Tensor) -> Tensor:
    """(H, R, E) x (H, R, E) -> (H, R) row-wise dot products."""
    return (left * right).sum(-1, dtype=_accumulator(left.dtype))


class GrowingKV:
    """Keys and values of one sequence in buffers of fixed capacity: append, and forget from the end."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add (G, M, E) keys and values; returns all of them, (G, length, E) each."""
        if self._keys is None or self._values is None:
            shape = (keys.shape[0], self.capacity, keys.shape[2])
            self._keys, self._values = keys.new_empty(shape), values.new_empty(shape)
        end = self.length + keys.shape[1]
        if end > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} tokens, {end} were given: start() with more max_tokens")
        self._keys[:, self.length : end] = keys
        self._values[:, self.length : end] = values
        self.length = end
        return self._keys[:, :end], self._values[:, :end]

    def crop(self, length: int) -> None:
        """Forget everything after the first `length` tokens."""
        self.length = min(self.length, length)


def cached_attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention of the last M of N rows.

    Args:
        query: (H, M, E), rotated.
        keys: (G, N, E), rotated, the last M of them the queries' own.
        values: (G, N, E).

    Returns:
        (H, M, E).
    """
    num_queries, num_keys = query.shape[1], keys.shape[1]
    mask = None
    if num_queries > 1:
        rows = torch.arange(num_keys - num_queries, num_keys, device=query.device)[:, None]
        mask = torch.arange(num_keys, device=query.device)[None] <= rows  # (M, N)
    return nn.functional.scaled_dot_product_attention(
        query[None], keys[None], values[None], attn_mask=mask, enable_gqa=True
    )[0]
