"""Lossless verification: which drafted tokens the target keeps, and what it adds.

Pure functions on tensors: no models, no state. The rules are those of speculative sampling (Leviathan et al. 2023,
arXiv:2211.17192, Algorithm 1; Chen et al. 2023, arXiv:2302.01318). The output follows the target's distribution
exactly, whatever the drafter proposes, as long as `draft_probs` is the distribution that drafts were really drawn from.

Shape letters: K = drafted tokens, V = target vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Verdict:
    """Outcome of one round."""

    num_accepted: int
    """Drafted tokens kept, 0..K."""
    next_token: int
    """The target's own token after them: correction or bonus."""


def verify_greedy(draft_tokens: Tensor, target_logits: Tensor) -> Verdict:
    """Keep drafts while they are the target's argmax; the next token is its argmax after them.

    Args:
        draft_tokens: (K,) int64, ids in the target vocabulary.
        target_logits: (K + 1, V), row k predicts the token after k drafted ones.

    Raises:
        ValueError: if target_logits has not K + 1 rows.
    """
    _require_rows("target_logits", target_logits, draft_tokens)
    choices = target_logits.argmax(dim=-1)  # (K + 1,)
    agrees = choices[:-1] == draft_tokens
    num_accepted = int(agrees.long().cumprod(dim=0).sum())  # the first miss ends the run
    return Verdict(num_accepted, int(choices[num_accepted]))


def verify_sampled(
    draft_tokens: Tensor, draft_probs: Tensor | None, target_probs: Tensor, generator: torch.Generator | None
) -> Verdict:
    """Token-level rejection sampling.

    Draft x_k is kept with probability min(1, p(x_k) / q(x_k)); at the first rejection the next token comes from the
    residual (p - q)+ normalised; if all are kept it comes from p after the last. Every decision draws its own uniform.

    Args:
        draft_tokens: (K,) int64.
        draft_probs: (K, V), q: what each draft was drawn from; None for deterministic drafts (q = one-hot).
        target_probs: (K + 1, V), p, after temperature, top-k and top-p.
        generator: source of randomness, on the device of the probabilities.

    Raises:
        ValueError: if the rows do not match K.
    """
    _require_rows("target_probs", target_probs, draft_tokens)
    if draft_probs is None:
        draft_probs = torch.nn.functional.one_hot(draft_tokens, target_probs.shape[1]).to(target_probs.dtype)
    elif len(draft_probs) != len(draft_tokens):
        raise ValueError(f"draft_probs needs K = {len(draft_tokens)} rows, got {len(draft_probs)}")
    device = target_probs.device
    uniforms = torch.rand(len(draft_tokens), generator=generator, dtype=torch.float64, device=device).tolist()
    for k, token in enumerate(draft_tokens.tolist()):
        p, q = target_probs[k], draft_probs[k]
        if uniforms[k] * float(q[token]) >= float(p[token]):  # u >= p/q, also right for p = 0
            return Verdict(k, _draw(residual(p, q), generator))
    return Verdict(len(draft_tokens), _draw(target_probs[-1], generator))


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """(V,) norm((p - q)+): what is left of p after the accepted part. Equal distributions leave p itself."""
    left = (target_probs - draft_probs).clamp_min(0)
    total = left.sum()
    return left / total if float(total) > 0 else target_probs


def _draw(probs: Tensor, generator: torch.Generator | None) -> int:
    return int(torch.multinomial(probs, 1, generator=generator))


def _require_rows(name: str, rows: Tensor, draft_tokens: Tensor) -> None:
    if len(rows) != len(draft_tokens) + 1:
        raise ValueError(
            f"{name} needs K + 1 = {len(draft_tokens) + 1} rows for K = {len(draft_tokens)} drafted tokens, "
            f"got {len(rows)}; include the row of the last committed token"
        )
