"""From logits to the distribution that a token is drawn from: the processors of transformers, in its order.

The same temperature, top-k, top-p and min-p are applied to the target's logits before verification and to the drafter's
before drafting: verification must see the distributions that tokens are really drawn from. The repetition penalty looks
at the text before each position, drafts included, so it is applied to the target's logits position by position; drafts
are made without it, which costs acceptance, never exactness.
"""

import torch
from pydantic import Field
from torch import Tensor

from conf import config


@config
class SamplingConfig:
    """Values: conf/sampling/*.yaml."""

    temperature: float = Field(ge=0)
    """0 is greedy."""
    top_k: int | None = Field(ge=1)
    """Keep the k most likely tokens, and those as likely as the k-th; None keeps all."""
    top_p: float = Field(gt=0, le=1)
    """Keep the smallest set of most likely tokens with at least this probability; 1 keeps all."""
    min_p: float = Field(ge=0, le=1)
    """Keep tokens with at least this share of the most likely one's probability; 0 keeps all."""
    repetition_penalty: float = Field(gt=0)
    """Logits of tokens that occur in prompt or output are divided by it (multiplied if negative); 1 changes nothing."""

    @property
    def greedy(self) -> bool:
        """Whether tokens are chosen by argmax."""
        return self.temperature == 0

    @property
    def penalises(self) -> bool:
        """Whether logits depend on which tokens have occurred."""
        return self.repetition_penalty != 1

    def penalise(self, logits: Tensor, seen: Tensor) -> Tensor:
        """Apply the repetition penalty.

        Args:
            logits: (..., V).
            seen: (..., V) bool, tokens that occur before each position.
        """
        changed = torch.where(logits > 0, logits / self.repetition_penalty, logits * self.repetition_penalty)
        return torch.where(seen, changed, logits)

    def probs(self, logits: Tensor) -> Tensor:
        """The distribution to sample from.

        Args:
            logits: (..., V), any float dtype, already penalised.

        Returns:
            (..., V) in float32 (float64 for float64 logits); rows sum to 1, removed tokens have exactly 0.

        Raises:
            ValueError: at temperature 0, where there is nothing to sample.
        """
        if self.greedy:
            raise ValueError("temperature 0 chooses by argmax: use the greedy rules instead of probs()")
        scaled = (logits if logits.dtype == torch.float64 else logits.float()) / self.temperature
        if self.top_k is not None and self.top_k < scaled.shape[-1]:
            smallest_kept = scaled.topk(self.top_k, dim=-1).values[..., -1:]
            scaled = scaled.masked_fill(scaled < smallest_kept, float("-inf"))
        probs = scaled.softmax(dim=-1)
        if self.top_p < 1:
            probs = _keep_top_p(probs, self.top_p)
        if self.min_p > 0:
            kept = torch.where(probs >= self.min_p * probs.amax(dim=-1, keepdim=True), probs, 0)
            probs = kept / kept.sum(dim=-1, keepdim=True)
        return probs


def _keep_top_p(probs: Tensor, top_p: float) -> Tensor:
    """Zero all but the most likely tokens that together reach `top_p`, and renormalise."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered  # probability of all more likely tokens
    kept = torch.where(before < top_p, ordered, 0)
    return torch.zeros_like(probs).scatter_(-1, order, kept / kept.sum(dim=-1, keepdim=True))
