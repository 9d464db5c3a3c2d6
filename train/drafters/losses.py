"""Distillation losses between the target's distribution p and the drafter's q, with their gradients in closed form.

Row by row, z the draft logits, over the draft vocabulary; p~ is p renormalised to it, alpha = sum_v min(p_v, q_v) the
probability that verification accepts a draft (so p itself, not p~):

    kind         loss                                             d loss / dz
    ce           -log q(x), x the text's own token                q - 1[x]
    soft_ce      -sum p~ log q                                    q - p~
    top_k_ce     -sum c log q, c = p~ (1 + w 1[v in top k of p])  q sum c - c
    kl           sum p~ (log p~ - log q)                          q - p~
    reverse_kl   sum q (log q - log p~)                           q (log q - log p~ - loss)
    jsd          (KL(p~ | m) + KL(q | m)) / 2,  m = (p~ + q) / 2  q (log q/m - sum q log q/m) / 2
    tv           1 - alpha, the total variation of p and q        -a,  a = d alpha/dz = q (1[q < p] - sum_{q<p} q)
    lk_alpha     -log alpha                                       -a / alpha
    lk_lambda    w kl + (1 - w)(1 - alpha),                       w (q - p~) - (1 - w) a
                 w = min(1, s exp(-decay alpha)), held constant

The last two are LK losses (arXiv:2602.23881). Shape letters: R = rows, V / Vd = target / draft vocabulary.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import softplus

LossKind = Literal["ce", "soft_ce", "top_k_ce", "kl", "reverse_kl", "jsd", "tv", "lk_alpha", "lk_lambda"]


@dataclass(frozen=True)
class LossSettings:
    """Which loss, and its constants."""

    kind: LossKind
    lk_scale: float
    """s of lk_lambda: weight s * exp(-lk_decay * alpha) of its KL part."""
    lk_decay: float
    top_k: int
    """k of top_k_ce."""
    top_k_weight: float
    """w of top_k_ce: how much more the k most likely tokens count (HASS, arXiv:2408.15766)."""
    mask_out_of_vocab: bool
    """Leave out labels whose argmax over the whole vocabulary the drafter cannot propose (EAGLE-3's own rule)."""
    step_weights: tuple[float, ...]
    """(S,) weight of each step's loss."""
    keep_ratio: float
    """Step k is taught on this share ** k of its labels, chosen at random (`chain_labels`), and weighted up by it."""
    compiled: bool
    """Let torch.compile fuse the formulas."""

    @property
    def needs_whole_vocabulary(self) -> bool:
        """Whether the teacher's logits outside the draft vocabulary matter."""
        return self.mask_out_of_vocab or self.kind in ("tv", "lk_alpha", "lk_lambda")


@dataclass(frozen=True)
class TeacherChunk:
    """The teacher's view of R labels."""

    renormalised: Tensor
    """(R, Vd) float32: softmax restricted to the draft vocabulary; (R, 0) for `ce`, as `logits`."""
    logits: Tensor
    """(R, Vd), in the precision that they were computed in: log p~ = logits - lse."""
    lse: Tensor
    """(R,) float32: log-sum-exp of `logits`."""
    mass: Tensor | None
    """(R,) float32: probability of the draft vocabulary under the whole softmax; None if the loss needs none."""
    best: Tensor
    """(R,) int64: the most likely draft token; for `ce` the text's own."""
    counts: Tensor
    """(R,) bool: False where the label is masked out of the loss."""

    def select(self, members: Tensor) -> "TeacherChunk":
        """The same of some of the labels."""
        return TeacherChunk(
            renormalised=self.renormalised.index_select(0, members),
            logits=self.logits.index_select(0, members),
            lse=self.lse[members],
            mass=None if self.mass is None else self.mass[members],
            best=self.best[members],
            counts=self.counts[members],
        )


def loss_and_gradient(
    draft_logits: Tensor, teacher: TeacherChunk, settings: LossSettings
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of each row and its gradient with respect to the draft logits; see the module's docstring.

    Args:
        draft_logits: (R, Vd) float32.
        teacher: of the same rows.
        settings: which loss.

    Returns:
        (R,) losses, (R, Vd) gradients (masked rows are not zeroed here) and (R,) whether the student's most likely
        draft token is the teacher's.
    """
    q, lse, top = softmax(draft_logits)
    matches = draft_logits.gather(1, teacher.best[:, None]).squeeze(1) == top
    if settings.kind in ("ce", "soft_ce", "top_k_ce"):
        loss, gradient = _cross_entropy(draft_logits, q, lse, teacher, settings)
        return loss, gradient, matches
    # log p~ - log q, without the rounding of either logarithm
    log_ratio = (teacher.logits - draft_logits).add_((lse - teacher.lse)[:, None])
    if settings.kind == "reverse_kl":
        loss = _reverse_kl(q, log_ratio, teacher)
        mean = dot(q, log_ratio)  # of the ratios as rounded: with it each row's gradient sums to 0
        return loss, q.mul_(mean[:, None] - log_ratio), matches
    if settings.kind == "jsd":
        loss, gradient = _jsd(q, log_ratio, teacher)
        return loss, gradient, matches
    kl = dot(teacher.renormalised, log_ratio)
    if settings.kind == "kl":
        return kl, q.sub_(teacher.renormalised), matches
    loss, gradient = _of_acceptance(q, kl, teacher, settings)
    return loss, gradient, matches


def _cross_entropy(
    draft_logits: Tensor, q: Tensor, lse: Tensor, teacher: TeacherChunk, settings: LossSettings
) -> tuple[Tensor, Tensor]:
    """ce, soft_ce and top_k_ce: -sum c (z - lse) for the weights c that they give the tokens."""
    if settings.kind == "ce":
        label = teacher.best[:, None]
        picked = draft_logits.gather(1, label)
        return lse - picked.squeeze(1), q.scatter_add_(1, label, -torch.ones_like(picked))
    if settings.kind == "soft_ce":
        return lse - dot(teacher.renormalised, draft_logits), q.sub_(teacher.renormalised)
    best = teacher.renormalised.topk(min(settings.top_k, q.shape[1]), dim=-1)
    wanted = teacher.renormalised.scatter_add(1, best.indices, settings.top_k_weight * best.values)
    total = wanted.sum(dim=-1)
    return lse * total - dot(wanted, draft_logits), q.mul_(total[:, None]).sub_(wanted)


def _reverse_kl(q: Tensor, log_ratio: Tensor, teacher: TeacherChunk) -> Tensor:
    """With r = log p~/q:  -sum q r, as sum q (e^r - 1 - r). That is the same, because both distributions sum to 1, but
    rounding of r matters in the second order only. Where r is large, q e^r is p~ as it stands."""
    excess = torch.where(log_ratio < 1, q * log_ratio.clamp(max=1).expm1(), teacher.renormalised - q)
    return (excess - q * log_ratio).sum(dim=-1)


def _jsd(q: Tensor, log_ratio: Tensor, teacher: TeacherChunk) -> tuple[Tensor, Tensor]:
    """With r = log p~/q:  log q/m = log 2 - log(1 + e^r),  log p~/m = log 2 - log(1 + e^-r)."""
    log_2 = math.log(2)
    of_q, of_p = log_2 - softplus(log_ratio), log_2 - softplus(-log_ratio)
    divergence = dot(q, of_q)
    return (dot(teacher.renormalised, of_p) + divergence) / 2, q * (of_q - divergence[:, None]) / 2


def _of_acceptance(q: Tensor, kl: Tensor, teacher: TeacherChunk, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """tv, lk_alpha and lk_lambda."""
    assert teacher.mass is not None  # `needs_whole_vocabulary`
    probs = teacher.renormalised * teacher.mass[:, None]
    alpha = torch.minimum(probs, q).sum(dim=-1).clamp_min(torch.finfo(q.dtype).tiny)
    below = q * (q < probs)
    alpha_gradient = below - q * below.sum(dim=-1, keepdim=True)
    if settings.kind == "tv":
        return 1 - alpha, -alpha_gradient
    if settings.kind == "lk_alpha":
        return -alpha.log(), -alpha_gradient / alpha[:, None]
    weight = (settings.lk_scale * torch.exp(-settings.lk_decay * alpha)).clamp(max=1)
    gradient = weight[:, None] * (q - teacher.renormalised) - (1 - weight)[:, None] * alpha_gradient
    return weight * kl + (1 - weight) * (1 - alpha), gradient


def softmax(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax (R, V), log-sum-exp (R,) and maximum (R,) of (R, V) logits, in passes that are cheap on a CPU, where
    `logsumexp` and `argmax` cost more than the softmax."""
    top = logits.amax(dim=-1)
    probs = logits.softmax(dim=-1)
    return probs, top - probs.amax(dim=-1).log(), top  # the largest probability is exp(top - lse), at least 1 / V


def dot(left: Tensor, right: Tensor) -> Tensor:
    """(R, V) x (R, V) -> (R,) row by row; element-wise, because autocast would round a matrix product."""
    return (left * right).sum(dim=-1)
