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
from dataclasses import dataclass, replace
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
    temperature: float
    """Both distributions are those of logits / temperature, and the loss is scaled by temperature ** 2 (Hinton et al.,
    arXiv:1503.02531): gradients keep their size, and unlikely tokens count for more."""
    compiled: bool
    """Let torch.compile fuse the formulas."""

    @property
    def needs_whole_vocabulary(self) -> bool:
        """Whether the teacher's logits outside the draft vocabulary matter."""
        return self.mask_out_of_vocab or self.kind in ("tv", "lk_alpha", "lk_lambda")


@dataclass(frozen=True)
class TeacherChunk:
    """The teacher's view of R labels, at the loss's temperature."""

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
    if settings.temperature != 1:
        scale = settings.temperature
        loss, gradient, matches = loss_and_gradient(draft_logits / scale, teacher, replace(settings, temperature=1.0))
        return loss * scale**2, gradient * scale, matches
    q, lse, top = softmax(draft_logits)
    matches = draft_logits.gather(1, teacher.best[:, None]).squeeze(1) == top
    if settings.kind in ("ce", "soft_ce", "top_k_ce"):
        loss, gradient = _cross_entropy(draft_logits, q, lse, teacher, settings)
        return loss, gradient, matches
    # log p~ - log q, without the rounding of either logarithm
    log_ratio = (teacher.logits - draft_logits).add_((lse - teacher.lse)[:, None])
    if settings.kind == "reverse_kl":
        return _kl(q, teacher.renormalised, log_ratio), -_centred(q, log_ratio), matches
    if settings.kind == "jsd":
        loss, gradient = _jsd(q, log_ratio, teacher)
        return loss, gradient, matches
    kl = _kl(teacher.renormalised, q, -log_ratio)
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


def _kl(of: Tensor, to: Tensor, log_ratio: Tensor) -> Tensor:
    """KL(of | to), with r = log to/of:  -sum of r, as sum of (e^r - 1 - r). That is the same, because both sum to 1,
    but rounding of r matters in the second order only. Where r is large, of e^r is `to` as it stands."""
    excess = torch.where(log_ratio < 1, of * log_ratio.clamp(max=1).expm1(), to - of)
    return (excess - of * log_ratio).sum(dim=-1)


def _centred(q: Tensor, values: Tensor) -> Tensor:
    """q (values - their mean under q). Taken from the value of the likeliest token first, which may be nearly the mean,
    so that it does not cancel; each row sums to 0."""
    values = values - values.gather(1, q.argmax(dim=-1, keepdim=True))
    return q * (values - dot(q, values)[:, None])


def _jsd(q: Tensor, log_ratio: Tensor, teacher: TeacherChunk) -> tuple[Tensor, Tensor]:
    """With r = log p~/q and u = (p~ - q) / (p~ + q) = tanh(r/2):  sum m (r u + log(1 - u^2)) / 2, where again nothing
    of the first order cancels.  log q/m = -log(1 + (e^r - 1)/2) in the gradient."""
    u = (log_ratio / 2).tanh()
    size = log_ratio.abs()
    far = 2 * (math.log(2) - torch.exp(-size).log1p()) - size  # the same logarithm, where u rounds to 1
    excess = log_ratio * u + torch.where(size < 1, -u * u, 0.0).log1p() + torch.where(size < 1, 0.0, far)
    of_q = torch.where(log_ratio < 1, -(log_ratio.clamp(max=1).expm1() / 2).log1p(), math.log(2) - softplus(log_ratio))
    return dot(q + teacher.renormalised, excess) / 4, _centred(q, of_q) / 2


def _of_acceptance(q: Tensor, kl: Tensor, teacher: TeacherChunk, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """tv, lk_alpha and lk_lambda."""
    assert teacher.mass is not None  # `needs_whole_vocabulary`
    probs = teacher.renormalised * teacher.mass[:, None]
    alpha = torch.minimum(probs, q).sum(dim=-1).clamp_min(torch.finfo(q.dtype).tiny)
    total_variation = (q - probs).clamp_min(0).sum(dim=-1)  # 1 - alpha, without its rounding near 0
    is_below = q < probs
    below, above = q * is_below, q * ~is_below
    alpha_gradient = below * above.sum(dim=-1, keepdim=True) - above * below.sum(dim=-1, keepdim=True)
    if settings.kind == "tv":
        return total_variation, -alpha_gradient
    if settings.kind == "lk_alpha":
        loss = torch.where(alpha > 0.5, -(-total_variation).log1p(), -alpha.log())
        return loss, -alpha_gradient / alpha[:, None]
    weight = (settings.lk_scale * torch.exp(-settings.lk_decay * alpha)).clamp(max=1)
    gradient = weight[:, None] * (q - teacher.renormalised) - (1 - weight)[:, None] * alpha_gradient
    return weight * kl + (1 - weight) * total_variation, gradient


def softmax(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax (R, V), log-sum-exp (R,) and maximum (R,) of (R, V) logits, in passes that are cheap on a CPU, where
    `logsumexp` and `argmax` cost more than the softmax."""
    top = logits.amax(dim=-1)
    probs = logits.softmax(dim=-1)
    return probs, top - probs.amax(dim=-1).log(), top  # the largest probability is exp(top - lse), at least 1 / V


def dot(left: Tensor, right: Tensor) -> Tensor:
    """(R, V) x (R, V) -> (R,) row by row; element-wise, because autocast would round a matrix product."""
    return (left * right).sum(dim=-1)
