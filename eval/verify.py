"""Lossless verification: which drafted tokens the target keeps, and what it adds.

Pure functions on tensors: no models, no state. Whatever the drafter proposes, the output follows the target's
distribution exactly, as long as `draft_probs` is the distribution that the drafts were really drawn from, after all
sampling processors.

    rule            drafts                      source
    greedy          chain                       emits the target's argmax everywhere
    token           chain, sampled or one-hot   Leviathan et al. 2023 (arXiv:2211.17192, Algorithm 1), Chen et al. 2023
    block           chain, sampled or one-hot   Sun et al. 2024 (arXiv:2403.10444, Algorithm 2)
    tree_greedy     tree                        the longest path of argmaxes
    tree_sampled    tree, siblings drawn        SpecInfer's recursive rejection (arXiv:2305.09781), without replacement
                    without replacement, or
                    one-hot

Every random decision goes through `Dice`, so that tests can enumerate all outcomes of these very functions.

Shape letters: B = sequences, K = drafts of a chain, N = nodes of a tree, V = target vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


class Dice:
    """The random decisions of verification. Each call uses random numbers of its own."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self.generator = generator

    def accept(self, probability: Tensor) -> Tensor:
        """Bool of the same shape, each True with its probability (float64); 0 never, 1 always."""
        uniforms = torch.rand(
            probability.shape, generator=self.generator, dtype=torch.float64, device=probability.device
        )
        return uniforms < probability

    def draw(self, probs: Tensor) -> Tensor:
        """(B, V) weights -> (B,) int64, one index of each row."""
        return torch.multinomial(probs, 1, generator=self.generator).squeeze(1)


@dataclass(frozen=True)
class Verdict:
    """Outcome of one round."""

    num_accepted: Tensor
    """(B,) int64: drafts kept, 0..K."""
    next_token: Tensor
    """(B,) int64: the target's own token after them, correction or bonus."""


def verify_greedy(draft_tokens: Tensor, target_logits: Tensor, num_drafts: Tensor | None = None) -> Verdict:
    """Keep drafts while they are the target's argmax; the next token is its argmax after them.

    Args:
        draft_tokens: (B, K) int64, ids in the target's vocabulary.
        target_logits: (B, K + 1, V), row k predicts the token after k drafts.
        num_drafts: (B,), how many of the K tokens are drafts; None: all.

    Raises:
        ValueError: if target_logits has not K + 1 rows.
    """
    _require_rows("target_logits", target_logits, draft_tokens)
    choices = target_logits.argmax(dim=-1)  # (B, K + 1)
    num_accepted = _leading((choices[:, :-1] == draft_tokens) & _drafted(draft_tokens, num_drafts))
    return Verdict(num_accepted, choices.gather(1, num_accepted[:, None]).squeeze(1))


def verify_token(
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    dice: Dice,
    num_drafts: Tensor | None = None,
) -> Verdict:
    """Token-level rejection sampling.

    Draft x_k is kept with probability min(1, p(x_k) / q(x_k)); at the first rejection the next token comes from the
    residual (p - q)+ normalised; if all are kept it comes from p after the last.

    Args:
        draft_tokens: (B, K) int64.
        draft_probs: (B, K, V), q: what each draft was drawn from; None for deterministic drafts (q = one-hot).
        target_probs: (B, K + 1, V), p, after all processors.
        dice: source of randomness.
        num_drafts: (B,), how many of the K tokens are drafts; None: all. It may depend on the text and on earlier
            drafts, never on the draft in question or later ones.

    Raises:
        ValueError: if the rows do not match K.
    """
    drafted = _drafted(draft_tokens, num_drafts)
    ratios = _ratios(draft_tokens, draft_probs, target_probs)
    num_accepted = _leading(dice.accept(torch.where(drafted, ratios.clamp_max(1), 0)))
    p, q = _rows_at(num_accepted, draft_tokens, draft_probs, target_probs, drafted)
    return Verdict(num_accepted, dice.draw(residual(p, q)))


def verify_block(
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    dice: Dice,
    num_drafts: Tensor | None = None,
) -> Verdict:
    """Block verification: the drafts are judged together and never keep fewer on average than token by token.

    With w_0 = 1 and w_i = min(1, w_{i-1} p(x_i) / q(x_i)), the i-th prefix passes with probability
    h_i = Z_i / (Z_i + 1 - w_i), Z_i = sum (w_i p - q)+ for the token after it, and h_K = w_K. The *longest* prefix that
    passes is kept; the next token comes from (w p - q)+ normalised, or from p after the last.

    Args and errors: as in `verify_token`.
    """
    drafted = _drafted(draft_tokens, num_drafts)
    ratios = _ratios(draft_tokens, draft_probs, target_probs)
    weights = [ratios.new_ones(len(ratios), 1)]
    for k in range(ratios.shape[1]):
        weights.append((weights[-1] * ratios[:, k : k + 1]).clamp_max(1))
    weight = torch.cat(weights, dim=1)  # (B, K + 1)
    scaled = weight[..., None] * target_probs  # w_i p(. | x_1..x_i)
    if draft_probs is None:  # (w p - one-hot)+ is w p without the draft itself, as w p <= 1
        own = scaled[:, :-1].gather(2, draft_tokens[..., None]).squeeze(2)
        excess = scaled[:, :-1].sum(dim=-1) - own
    else:
        excess = (scaled[:, :-1] - draft_probs).clamp_min(0).sum(dim=-1)  # (B, K): Z_0 .. Z_{K-1}
    left = excess + 1 - weight[:, :-1]
    passes = torch.where(left > 0, excess / left.clamp_min(torch.finfo(left.dtype).tiny), 1)
    passes = torch.cat([passes[:, 1:], weight[:, -1:]], dim=1)  # h_1 .. h_K
    is_last = drafted & ~nn.functional.pad(drafted, (0, 1))[:, 1:]
    passes = torch.where(is_last, weight[:, 1:], passes)
    kept = dice.accept(torch.where(drafted, passes, 0))
    lengths = kept * torch.arange(1, kept.shape[1] + 1, device=kept.device)
    num_accepted = nn.functional.pad(lengths, (1, 0)).amax(dim=1)  # 0 where none passes, or none was drafted
    p, q = _rows_at(num_accepted, draft_tokens, draft_probs, scaled, drafted)
    return Verdict(num_accepted, dice.draw(residual(p, q)))


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """(B, V) norm((p - q)+): what is left of p after the accepted part. Where nothing is left, p itself."""
    left = (target_probs - draft_probs).clamp_min(0)
    total = left.sum(dim=-1, keepdim=True)
    whole = target_probs / target_probs.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(left.dtype).tiny)
    return torch.where(total > 0, left / total.clamp_min(torch.finfo(left.dtype).tiny), whole)


def verify_tree_greedy(tokens: Tensor, parents: Tensor, target_logits: Tensor) -> tuple[list[int], int]:
    """Follow the target's argmaxes through a tree of drafts.

    Args:
        tokens: (N,) int64.
        parents: (N,) int64, each node's parent among the nodes before it, -1 for children of the root.
        target_logits: (N + 1, V), row 0 after the committed text, row i + 1 after node i.

    Returns:
        The accepted path (node indices) and the next token.
    """
    choices, found = target_logits.argmax(dim=-1).tolist(), tokens.tolist()
    children = _children(parents)
    path: list[int] = []
    node = -1
    while True:
        wanted = choices[node + 1]
        match = [child for child in children.get(node, []) if found[child] == wanted]
        if not match:
            return path, wanted
        node = match[0]
        path.append(node)


def verify_tree_sampled(
    tokens: Tensor, parents: Tensor, draft_probs: Tensor | None, target_probs: Tensor, dice: Dice
) -> tuple[list[int], int]:
    """Recursive rejection: at each node its children are tried in turn.

    Child x is kept with probability min(1, p(x) / q(x)); after a rejection p becomes norm((p - q)+) and q forgets x and
    is renormalised (the siblings were drawn without replacement, in this order). If all are rejected, the next token
    comes from what is left of p. Deterministic siblings have a one-hot q each: kept with p(x), then p forgets x.

    Args:
        tokens: (N,) int64; children of one node are distinct and in the order in which they were drawn.
        parents: (N,) int64, as in `verify_tree_greedy`.
        draft_probs: (N + 1, V), what the children of the root (row 0) or of node i (row i + 1) were drawn from; None
            for deterministic trees.
        target_probs: (N + 1, V), after all processors.
        dice: source of randomness.

    Returns:
        The accepted path (node indices) and the next token.
    """
    found = tokens.tolist()
    children = _children(parents)
    path: list[int] = []
    node = -1
    while True:
        p = target_probs[node + 1][None]
        q = None if draft_probs is None else draft_probs[node + 1][None]
        for child in children.get(node, []):
            token = found[child]
            drawn_with = 1.0 if q is None else float(q[0, token])
            if drawn_with == 0:
                continue  # filling: fewer tokens than branches had any probability
            if bool(dice.accept((p[:, token].double() / drawn_with).clamp_max(1))):
                break
            one_hot = torch.zeros_like(p).index_fill_(1, tokens[child : child + 1], 1)
            p = residual(p, one_hot if q is None else q)
            if q is not None:
                q = _renormalised(q * (1 - one_hot))
        else:
            return path, int(dice.draw(p))
        path.append(child)
        node = child


def _renormalised(weights: Tensor) -> Tensor:
    return weights / weights.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)


def _children(parents: Tensor) -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents.tolist()):
        children.setdefault(parent, []).append(node)
    return children


def _ratios(draft_tokens: Tensor, draft_probs: Tensor | None, target_probs: Tensor) -> Tensor:
    """(B, K) float64 p(x_k) / q(x_k)."""
    _require_rows("target_probs", target_probs, draft_tokens)
    p = target_probs[:, :-1].gather(2, draft_tokens[..., None]).squeeze(2).double()
    if draft_probs is None:
        return p
    if draft_probs.shape[1] != draft_tokens.shape[1]:
        raise ValueError(f"draft_probs needs K = {draft_tokens.shape[1]} rows, got {draft_probs.shape[1]}")
    q = draft_probs.gather(2, draft_tokens[..., None]).squeeze(2).double()
    return p / q.clamp_min(torch.finfo(q.dtype).tiny)


def _drafted(draft_tokens: Tensor, num_drafts: Tensor | None) -> Tensor:
    """(B, K) bool: which of the tokens are drafts."""
    if num_drafts is None:
        return torch.ones_like(draft_tokens, dtype=torch.bool)
    return torch.arange(draft_tokens.shape[1], device=draft_tokens.device) < num_drafts[:, None]


def _rows_at(
    index: Tensor, draft_tokens: Tensor, draft_probs: Tensor | None, target_probs: Tensor, drafted: Tensor
) -> tuple[Tensor, Tensor]:
    """p and q (B, V) after `index` (B,) drafts; q is 0 after the last, where nothing was drafted."""
    batch = torch.arange(len(index), device=index.device)
    p = target_probs[batch, index]
    q = torch.zeros_like(p)
    followed = nn.functional.pad(drafted, (0, 1))[batch, index]  # K may be 0: nothing to slice a column from
    within = torch.nonzero(followed).squeeze(1)
    if draft_probs is None:
        q[within, draft_tokens[within, index[within]]] = 1
    else:
        q[within] = draft_probs[within, index[within]].to(q.dtype)
    return p, q


def _leading(flags: Tensor) -> Tensor:
    """(B, K) bool -> (B,) int64, how many are True before the first False."""
    return flags.long().cumprod(dim=1).sum(dim=1)


def _require_rows(name: str, rows: Tensor, draft_tokens: Tensor) -> None:
    drafts = draft_tokens.shape[1]
    if rows.shape[1] != drafts + 1:
        raise ValueError(
            f"{name} needs K + 1 = {drafts + 1} rows for K = {drafts} drafted tokens, got {rows.shape[1]}; include the "
            "row of the last committed token"
        )
