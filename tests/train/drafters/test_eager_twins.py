"""Every fast path against its eager twin, which autograd differentiates: losses and gradients on random shapes.

The twin runs in float64 and in the fast path's dtype. The fast path must agree with the former to 1e-6 relative in
float32 and 1e-2 in bfloat16 (the gradient as one vector), but for the rounding that no implementation escapes: where
the student is nearly right, q - p loses its digits. That is measured twice, by what the twin loses and, as the twin can
be lucky, by what changes in float64 when every intermediate result changes in its last digit.
"""

import shutil
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data import blocked_attention
from data.encode import Document
from data.packing import collate
from train.drafters import distillation
from train.drafters.distillation import Teacher, chunked_distillation
from train.drafters.losses import LossSettings
from train.drafters.rows import chain_labels
from train.drafters.ttt_attention import ttt_attention as fast_attention

KINDS = ["ce", "soft_ce", "top_k_ce", "kl", "reverse_kl", "jsd", "tv", "lk_alpha", "lk_lambda"]
LIMITS = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
ROUNDING = 4
"""How much more of it than that."""
NUDGES = 5

documents = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), min_size=1, max_size=5)
"""(prompt tokens, answer tokens) of each document: often without a label, or with one."""


def assert_as_exact(fast, exact, rounded, limit):
    """Each a value and its gradients; `rounded` are several, each with some rounding."""
    assert [part.shape for part in fast] == [part.shape for part in exact]
    for found, expected, *others in zip(
        *(value_and_gradient(result) for result in (fast, exact, *rounded)), strict=True
    ):
        allowed = limit * expected.norm() + ROUNDING * max((other - expected).norm() for other in others)
        assert (found - expected).norm() <= allowed


def value_and_gradient(result):
    value, *gradients = result
    return value.double(), torch.cat([part.double().flatten() for part in gradients])


def exact(tensor, dtype=None):
    return tensor


def nudge(seed, dtype):
    """A function that changes a tensor by up to one rounding in `dtype`, or in another that it is given."""
    generator = torch.Generator().manual_seed(seed)

    def nudged(tensor, dtype=dtype):
        change = torch.empty(tensor.shape, dtype=tensor.dtype).uniform_(-1, 1, generator=generator)
        return tensor * (1 + torch.finfo(dtype).eps * change)

    return nudged


def references(differentiated, twin, dtype):
    """What it should be, and the same with roundings."""
    rounded = [differentiated(twin, torch.float64, nudge(seed, dtype)) for seed in range(NUDGES)]
    rounded.append(differentiated(twin, dtype, exact))
    return differentiated(twin, torch.float64, exact), rounded


def wide(tensor):
    """At least float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def batch_of(runs, generator):
    documents = [
        Document([0] * (prompt + answer), [False] * prompt + [True] * answer, "test") for prompt, answer in runs
    ]
    weight = 1 / max(sum(answer for _, answer in runs), 1)
    seeds = torch.randint(0, 2**31, (len(runs),), generator=generator).tolist()
    return collate([documents], sum(map(len, documents)), [[weight] * len(runs)], [seeds])


def log_softmax(logits, rounded):
    shifted = logits - logits.detach().amax(-1, keepdim=True)
    return rounded(shifted - rounded(shifted.exp().sum(-1, keepdim=True), torch.float32).log(), torch.float32)


def eager_losses(kind, student, teacher_logits, draft_ids, scale, decay, temperature, rounded):
    """(N,) losses of (N, Vd) student and (N, V) teacher logits, unchunked; `rounded` sees every step."""
    student, teacher_logits = (rounded(wide(logits)) / temperature for logits in (student, teacher_logits))
    log_q, log_p = log_softmax(student, rounded), log_softmax(teacher_logits[:, draft_ids], rounded)
    of_all = log_softmax(teacher_logits, rounded)
    q, p = rounded(log_q.exp(), torch.float32), rounded(of_all.exp(), torch.float32)[:, draft_ids]
    p_tilde = rounded(log_p.exp(), torch.float32)
    mean = ((p_tilde + q) / 2).log()
    kl = (p_tilde * (log_p - log_q)).sum(-1)
    alpha = torch.minimum(p, q).sum(-1)
    weight = (scale * (-decay * alpha).exp()).clamp(max=1).detach()
    best = p_tilde.topk(2, dim=-1)
    return {
        "soft_ce": -(p_tilde * log_q).sum(-1),
        "top_k_ce": -(p_tilde * log_q).sum(-1) - 3.0 * (best.values * log_q.gather(-1, best.indices)).sum(-1),
        "kl": kl,
        "reverse_kl": (q * (log_q - log_p)).sum(-1),
        "jsd": (p_tilde * (log_p - mean) + q * (log_q - mean)).sum(-1) / 2,
        "tv": 1 - alpha,
        "lk_alpha": -alpha.log(),
        "lk_lambda": weight * kl + (1 - weight) * (1 - alpha),
    }[kind]


def eager_distillation(hidden, heads, teacher, labels, weights, chosen, rounded):
    teacher_logits = teacher.hidden @ teacher.lm_head.T
    total = sum(part.sum() * 0 for part in (*heads, *hidden))
    for step, rows in enumerate(hidden):
        label = labels.label[labels.taught[step]]
        of_label = teacher_logits[label - 1]
        logits = rows @ (heads[step] if len(heads) > 1 else heads[0]).T
        if chosen.kind == "ce":
            known = teacher.token_ids[label] >= 0
            log_q = log_softmax(rounded(wide(logits)) / chosen.temperature, rounded)
            losses = -log_q.gather(1, teacher.token_ids[label].clamp_min(0)[:, None]).squeeze(1) * known
        else:
            losses = eager_losses(
                chosen.kind,
                logits,
                of_label,
                teacher.draft_to_target_ids,
                chosen.lk_scale,
                chosen.lk_decay,
                chosen.temperature,
                rounded,
            )
        if chosen.mask_out_of_vocab and chosen.kind != "ce":
            known = of_label[:, teacher.draft_to_target_ids]
            losses = losses * (known.amax(-1) == of_label.amax(-1))  # in bfloat16 two logits may tie
        share = chosen.temperature**2 * weights[label] * chosen.step_weights[step] / chosen.keep_ratio**step
        total = total + (losses * share).sum()
    return total


@pytest.mark.parametrize("dtype", list(LIMITS))
@pytest.mark.parametrize("kind", KINDS)
@given(
    runs=documents, steps=st.integers(1, 4), width=st.integers(1, 16), draft=st.integers(2, 20),
    more=st.integers(0, 20), chunk=st.integers(1, 20), block=st.integers(1, 8), keep=st.sampled_from([1.0, 0.6]),
    temperature=st.sampled_from([1.0, 2.0]), masked=st.booleans(), frozen=st.booleans(), separate=st.booleans(),
    seed=st.integers(0, 10**6),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_distillation(
    kind, dtype, runs, steps, width, draft, more, chunk, block, keep, temperature, masked, frozen, separate, seed
):
    generator = torch.Generator().manual_seed(seed)
    batch = batch_of(runs, generator)
    labels = chain_labels(batch, steps, keep)
    draft_ids = torch.randperm(draft + more, generator=generator)[:draft].sort().values
    unit = width**-0.5  # of the logits' variance: where softmax saturates, float32 has lost 1 - p already
    lm_head = unit * torch.randn(draft + more, width, generator=generator).to(dtype)
    teacher = Teacher(
        torch.randn(batch.input_ids.numel(), width, generator=generator).to(dtype),
        lm_head,
        lm_head[draft_ids],
        draft_ids,
        torch.randint(-1, draft, (batch.input_ids.numel(),), generator=generator),
    )
    weights = tuple(0.8**k for k in range(steps))
    chosen = LossSettings(kind, 0.9, 3.0, 2, 3.0, masked, weights, keep, temperature, compiled=False)
    hidden = [torch.randn(len(taught), width, generator=generator).to(dtype) for taught in labels.taught]
    num_heads = steps if separate else 1
    heads = [unit * torch.randn(draft, width, generator=generator).to(dtype) for _ in range(num_heads)]

    def differentiated(run, dtype, *rounded):
        leaves = [rows.to(dtype).clone().requires_grad_() for rows in hidden]
        own_heads = [head.to(dtype).clone().requires_grad_(not frozen) for head in heads]
        own_teacher = Teacher(
            *(part.to(dtype) for part in list(vars(teacher).values())[:3]), draft_ids, teacher.token_ids
        )
        total = run(leaves, own_heads, own_teacher, labels, batch.token_weights.flatten(), chosen, *rounded)
        total.backward()
        return [total.detach(), *(leaf.grad for leaf in (*leaves, *([] if frozen else own_heads)))]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distillation, "CHUNK_ROWS", chunk)
        patch.setattr(distillation, "CPU_BLOCK_ROWS", block)
        fast = differentiated(lambda *arguments: chunked_distillation(*arguments)[0], dtype)
    assert_as_exact(fast, *references(differentiated, eager_distillation, dtype), LIMITS[dtype])


def eager_attention(query, keys, values, own_keys, own_values, rows, spans, rounded):
    """One softmax over the keys of step 0 and the diagonals."""
    group = len(query) // len(keys)
    document = torch.full((keys.shape[1],), -1)
    for index, (start, end) in enumerate(spans):
        document[start:end] = index
    allowed = (torch.arange(keys.shape[1]) <= rows[:, None]) & (document[rows, None] == document)
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scale = query.shape[-1] ** -0.5
    scores = [wide(query @ keys.mT).masked_fill(~allowed, float("-inf"))]
    scores += [(wide(query) * own.repeat_interleave(group, 0)).sum(-1, keepdim=True) for own in own_keys]
    probs = rounded((rounded(torch.cat(scores, dim=-1)) * scale).softmax(-1))
    out = probs[..., : keys.shape[1]].to(query.dtype) @ values
    for index, own in enumerate(own_values):
        out = out + probs[..., keys.shape[1] + index, None].to(query.dtype) * own.repeat_interleave(group, 0)
    return out


@pytest.mark.parametrize("dtype", list(LIMITS))
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4), heads=st.integers(1, 3), group=st.integers(1, 3),
    size=st.sampled_from([2, 8, 16]), steps=st.integers(0, 3), block=st.integers(1, 9), asking=st.floats(0, 1),
    seed=st.integers(0, 10**6),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_attention(dtype, lengths, heads, group, size, steps, block, asking, seed):
    generator = torch.Generator().manual_seed(seed)
    borders = torch.tensor([0, *lengths]).cumsum(0).tolist()
    rows = torch.nonzero(torch.rand(borders[-1], generator=generator) <= asking).flatten()
    spans = list(pairwise(borders))

    def draw(*shape):
        return torch.randn(*shape, size, generator=generator).to(dtype)

    given_ones = [draw(heads * group, len(rows)), draw(heads, borders[-1]), draw(heads, borders[-1])]
    given_ones += [draw(heads, len(rows)) for _ in range(2 * steps)]
    upstream = draw(heads * group, len(rows))

    def differentiated(run, dtype, *rounded):
        leaves = [tensor.to(dtype).clone().requires_grad_() for tensor in given_ones]
        out = run(*leaves[:3], leaves[3 : 3 + steps], leaves[3 + steps :], rows, spans, *rounded)
        out.backward(upstream.to(dtype))
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocked_attention, "BLOCK_ROWS", block)
        fast = differentiated(fast_attention, dtype)
    assert_as_exact(fast, *references(differentiated, eager_attention, dtype), LIMITS[dtype])


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("kind", ["kl", "lk_lambda"])
def test_compiled_formulas_are_the_eager_ones(kind):
    generator = torch.Generator().manual_seed(0)
    batch = batch_of([(2, 9), (1, 5)], generator)
    labels = chain_labels(batch, 2)
    draft_ids = torch.arange(0, 30, 2)
    lm_head = torch.randn(30, 8, generator=generator)
    token_ids = torch.randint(-1, 15, (17,), generator=generator)
    teacher = Teacher(torch.randn(17, 8, generator=generator), lm_head, lm_head[draft_ids], draft_ids, token_ids)
    hidden = [torch.randn(len(taught), 8, generator=generator) for taught in labels.taught]
    found = []
    for compiled in (False, True):
        chosen = LossSettings(kind, 0.9, 3.0, 2, 3.0, False, (1.0, 0.5), 1.0, 1.0, compiled)
        leaves = [rows.clone().requires_grad_() for rows in hidden]
        total = chunked_distillation(
            leaves, [teacher.draft_head], teacher, labels, batch.token_weights.flatten(), chosen
        )[0]
        total.backward()
        found.append(torch.cat([total.detach()[None], *(leaf.grad.flatten() for leaf in leaves)]))
    eager, fused = found
    assert (fused - eager).norm() <= 1e-6 * eager.norm()
