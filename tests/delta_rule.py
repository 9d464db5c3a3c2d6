"""The gated delta rule (arXiv:2412.06464, equation 10), row by row, in the dtype of what comes in.

transformers' own computes in float32 even in a float64 model, of which layers with random weights make 1e-4.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next

RULES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, **_unused: Any
) -> tuple[Tensor, Tensor]:
    """S <- S exp(g) (I - beta k k^T) + beta v k^T;  o = S q / sqrt(E), with k and q of length 1."""
    share = value.shape[2] // key.shape[2]
    query, key = (part.repeat_interleave(share, dim=2) for part in (query, key))
    query, key = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (query, key))
    state = value.new_zeros(*value.shape[::2], value.shape[3], key.shape[3]) if initial_state is None else initial_state
    rows = []
    for t in range(value.shape[1]):
        k, v, b = key[:, t, :, :, None], value[:, t, :, :, None], beta[:, t, :, None, None]
        state = state * g[:, t, :, None, None].to(state.dtype).exp()
        state = state - b * (state @ k) @ k.mT + b * v @ k.mT
        rows.append((state @ query[:, t, :, :, None])[..., 0] * key.shape[3] ** -0.5)
    return torch.stack(rows, dim=1), state


def use_exact_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (modeling_qwen3_5, modeling_qwen3_next):
        for name in RULES:
            monkeypatch.setattr(module, name, delta_rule)
