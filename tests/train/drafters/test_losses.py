"""Distillation losses: closed-form gradients against autograd, the chunked form against a naive float64 one."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from data.batch import Batch
from train.drafters import distillation
from train.drafters.distillation import Teacher, chunked_distillation
from train.drafters.losses import LossSettings, TeacherChunk, loss_and_gradient
from train.drafters.rows import chain_labels

KINDS = ["soft_ce", "top_k_ce", "kl", "reverse_kl", "jsd", "tv", "lk_alpha", "lk_lambda"]
V, VD, D = 23, 11, 6
DRAFT_IDS = torch.tensor([0, 1, 4, 5, 8, 9, 12, 15, 17, 20, 22])


def settings_of(
    kind, mask_out_of_vocab=False, step_weights=(1.0,), scale=0.9, decay=3.0, keep_ratio=1.0, temperature=1.0
):
    return LossSettings(
        kind, scale, decay, 2, 3.0, mask_out_of_vocab, tuple(step_weights), keep_ratio, temperature, compiled=False
    )


def naive_loss(kind, draft_logits, target_logits, draft_ids, scale=0.9, decay=3.0, temperature=1.0):
    """The formulas of recipes.md 2.2, row by row, for autograd."""
    draft_logits, target_logits = draft_logits / temperature, target_logits / temperature
    q = draft_logits.softmax(-1)
    p = target_logits.softmax(-1)[:, draft_ids]
    p_tilde = p / p.sum(-1, keepdim=True)
    cross_entropy = -(p_tilde * q.log()).sum(-1)
    kl = cross_entropy + (p_tilde * p_tilde.log()).sum(-1)
    mean = (p_tilde + q) / 2
    alpha = torch.minimum(p, q).sum(-1)
    kept = p_tilde >= p_tilde.sort(-1).values[..., -min(2, p.shape[-1])].unsqueeze(-1)
    weight = (scale * (-decay * alpha).exp()).detach()
    return {
        "soft_ce": cross_entropy,
        "top_k_ce": cross_entropy - 3.0 * (kept * p_tilde * q.log()).sum(-1),
        "kl": kl,
        "reverse_kl": (q * (q / p_tilde).log()).sum(-1),
        "jsd": ((p_tilde * (p_tilde / mean).log()).sum(-1) + (q * (q / mean).log()).sum(-1)) / 2,
        # Total variation over the whole vocabulary, where q is 0 outside the draft vocabulary.
        "tv": ((p - q).abs().sum(-1) + 1 - p.sum(-1)) / 2,
        "lk_alpha": -alpha.log(),
        "lk_lambda": weight * kl + (1 - weight) * (1 - alpha),
    }[kind]


def chunk_of(target_logits, draft_ids):
    logits = target_logits[:, draft_ids]
    renormalised = logits.softmax(-1)
    return TeacherChunk(
        renormalised=renormalised,
        logits=logits,
        lse=logits.logsumexp(-1),
        mass=target_logits.softmax(-1)[:, draft_ids].sum(-1),
        best=renormalised.argmax(-1),
        counts=torch.ones(len(target_logits), dtype=torch.bool),
    )


@pytest.mark.parametrize("kind", KINDS)
@given(
    rows=st.integers(1, 5), size=st.integers(2, 9), hidden=st.integers(0, 6), spread=st.floats(0.1, 4),
    scale=st.floats(0, 1), decay=st.floats(0, 5), temperature=st.sampled_from([1.0, 2.0]), seed=st.integers(0, 999),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_gradient_is_that_of_the_naive_formula(kind, rows, size, hidden, spread, scale, decay, temperature, seed):
    generator = torch.Generator().manual_seed(seed)
    target_logits = spread * torch.randn(rows, size + hidden, generator=generator, dtype=torch.float64)
    draft_logits = spread * torch.randn(rows, size, generator=generator, dtype=torch.float64)
    draft_ids = torch.randperm(size + hidden, generator=generator)[:size].sort().values
    chunk = chunk_of(target_logits / temperature, draft_ids)
    chosen = settings_of(kind, scale=scale, decay=decay, temperature=temperature)
    loss, gradient, matches = loss_and_gradient(draft_logits, chunk, chosen)

    leaf = draft_logits.clone().requires_grad_()
    expected = temperature**2 * naive_loss(kind, leaf, target_logits, draft_ids, scale, decay, temperature)
    expected.sum().backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-9, atol=1e-12)
    assert torch.equal(matches, draft_logits.argmax(-1) == chunk.best)


@pytest.mark.parametrize("kind", KINDS)
def test_teacher_that_is_certain_gives_finite_losses(kind):
    """Probabilities of exactly 0 and 1, in float32, on either side."""
    certain = torch.tensor([[200.0, 0.0, -200.0], [0.0, 0.0, 200.0]])
    chunk = chunk_of(certain, torch.arange(3))
    for draft_logits in (certain, -certain):
        loss, gradient, _ = loss_and_gradient(draft_logits.clone(), chunk, settings_of(kind))
        assert loss.isfinite().all() and gradient.isfinite().all()


def problem(masks, num_steps, seed=0):
    """Float32 inputs of chunked_distillation on documents with the given masks (one pack)."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [len(mask) for mask in masks]
    rows = sum(lengths)
    mask = torch.tensor([[letter == "A" for mask in masks for letter in mask]])
    batch = Batch(
        input_ids=torch.zeros(1, rows, dtype=torch.int64),
        position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
        document_ids=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None],
        loss_mask=mask,
        token_weights=torch.rand(1, rows, generator=generator) * mask,
        uniforms=torch.rand(1, rows, generator=generator),
    )
    lm_head = torch.randn(V, D, generator=generator)
    return SimpleNamespace(
        masks=masks,
        batch=batch,
        hidden=[torch.randn(rows, D, generator=generator).requires_grad_() for _ in range(num_steps)],
        head=torch.randn(VD, D, generator=generator).requires_grad_(),
        teacher=Teacher(
            torch.randn(rows, D, generator=generator),
            lm_head,
            lm_head[DRAFT_IDS],
            DRAFT_IDS,
            torch.zeros(rows, dtype=torch.int64),
        ),
    )


def chunked(p, loss_settings):
    labels = chain_labels(p.batch, len(p.hidden), loss_settings.keep_ratio)
    hidden = [rows[labels.rows(step)] for step, rows in enumerate(p.hidden)]
    return chunked_distillation(hidden, [p.head], p.teacher, labels, p.batch.token_weights.flatten(), loss_settings)


def naive(p, loss_settings):
    """The same from a double loop over rows and steps in float64: total, losses, matches, leaves."""
    hidden = [rows.detach().double().requires_grad_() for rows in p.hidden]
    head = p.head.detach().double().requires_grad_()
    target_logits = p.teacher.hidden.double() @ p.teacher.lm_head.double().T
    weights = p.batch.token_weights.flatten().double()
    step_losses = [0 * rows.sum() for rows in hidden]  # so that a step without labels has gradients of 0
    matches = torch.zeros(len(hidden), dtype=torch.float64)
    start = 0
    for mask in p.masks:
        for step in range(len(hidden)):
            for row in range(len(mask)):
                if mask[row + 1 : row + 3 + step] != "A" * (step + 2):
                    continue
                if p.batch.uniforms[0, start + row] >= loss_settings.keep_ratio**step:
                    continue
                label = start + row + 2 + step
                teacher_row = target_logits[label - 1][None]
                if loss_settings.mask_out_of_vocab and int(teacher_row.argmax()) not in DRAFT_IDS.tolist():
                    continue
                logits = hidden[step][start + row][None] @ head.T
                step_losses[step] = (
                    step_losses[step]
                    + weights[label]
                    / loss_settings.keep_ratio**step
                    * naive_loss(loss_settings.kind, logits, teacher_row, DRAFT_IDS)[0]
                )
                matches[step] += (
                    weights[label]
                    / loss_settings.keep_ratio**step
                    * (logits.argmax() == teacher_row[:, DRAFT_IDS].argmax())
                )
        start += len(mask)
    total = sum(w * loss for w, loss in zip(loss_settings.step_weights, step_losses, strict=True))
    return total, torch.stack(step_losses).detach(), matches, [*hidden, head]


def assert_relative(found, expected, limit=1e-6):
    assert found.shape == expected.shape
    assert (found.double() - expected).norm() <= limit * expected.norm()


@pytest.mark.parametrize("keep_ratio", [1.0, 0.8])
@pytest.mark.parametrize("mask_out_of_vocab", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_chunked_equals_naive_with_gradients(monkeypatch, kind, mask_out_of_vocab, keep_ratio):
    monkeypatch.setattr(distillation, "CHUNK_ROWS", 4)  # 13 labels: three full chunks and a rest
    p = problem(["pppAAAAAA", "pAApAAA", "pp", "ppAAAA", "pAAA"], num_steps=3)
    assert len(chain_labels(p.batch, 3).label) == 13
    loss_settings = settings_of(kind, mask_out_of_vocab, (1.0, 0.7, 0.49), keep_ratio=keep_ratio)
    total, step_losses, matches = chunked(p, loss_settings)
    (3.7 * total).backward()
    expected_total, expected_losses, expected_matches, leaves = naive(p, loss_settings)
    (3.7 * expected_total).backward()
    assert_relative(total, expected_total.detach())
    assert_relative(step_losses, expected_losses)
    assert_relative(matches, expected_matches)
    for leaf, expected in zip([*p.hidden, p.head], leaves, strict=True):
        assert_relative(leaf.grad, expected.grad)


def test_out_of_vocabulary_labels_exist_in_the_test_above():
    p = problem(["pppAAAAAA", "pAApAAA", "pp", "ppAAAA", "pAAA"], num_steps=3)
    free, masked = (chunked(p, settings_of("kl", mask, (1.0,) * 3))[1] for mask in (False, True))
    assert (masked > 0).all() and (masked < free).all()


@pytest.mark.parametrize("masks", [["ppp"], ["ppA", "pA"]])
def test_no_label_gives_zero_loss_and_zero_gradients(masks):
    p = problem(masks, num_steps=2)
    total, step_losses, matches = chunked(p, settings_of("kl", step_weights=(1.0, 1.0)))
    total.backward()
    assert total.item() == 0 and step_losses.tolist() == [0, 0] and matches.tolist() == [0, 0]
    assert all((leaf.grad == 0).all() for leaf in [*p.hidden, p.head])


def test_one_label_by_autograd():
    p = problem(["ppAA"], num_steps=3)
    loss_settings = settings_of("kl", step_weights=(0.5, 1.0, 1.0))
    total, step_losses, _ = chunked(p, loss_settings)
    total.backward()
    expected, _, _, leaves = naive(p, loss_settings)
    expected.backward()
    assert_relative(total, expected.detach())
    assert step_losses[1:].tolist() == [0, 0]  # a second draft would have to predict a third token
    assert_relative(p.hidden[0].grad, leaves[0].grad)
    assert p.hidden[0].grad.norm(dim=1).nonzero().flatten().tolist() == [1]
    assert (p.hidden[1].grad == 0).all() and (p.hidden[2].grad == 0).all()


def test_frozen_head_gets_no_gradient_and_leaves_the_others_unchanged():
    free, frozen = problem(["pAAAA"], 2), problem(["pAAAA"], 2)
    frozen.head.requires_grad_(False)
    for p in (free, frozen):
        chunked(p, settings_of("kl", step_weights=(1.0, 1.0)))[0].backward()
    assert frozen.head.grad is None
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(free.hidden, frozen.hidden, strict=True))


class WidestLogits(TorchDispatchMode):
    """Remembers the most rows of any tensor whose last dimension is a vocabulary."""

    rows = 0

    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
        result = operation(*arguments, **(keywords or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.dim() > 1 and tensor.shape[-1] in (V, VD):
                self.rows = max(self.rows, tensor.numel() // tensor.shape[-1])
        return result


@pytest.mark.parametrize("kind", KINDS)
def test_no_tensor_of_all_labels_by_vocabulary_exists(monkeypatch, kind):
    monkeypatch.setattr(distillation, "CHUNK_ROWS", 8)
    p = problem(["p" + "A" * 41], num_steps=3)
    with WidestLogits() as widest:
        chunked(p, settings_of(kind, True, (1.0,) * 3))[0].backward()
    assert widest.rows == 8


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_rounds_nothing_that_was_given_in_bfloat16(kind):
    """Softmax statistics and losses stay float32 whatever precision the matrix products have."""
    p = problem(["pAAAAAA", "pppAAA"], num_steps=2)
    p.hidden = [rows.detach().bfloat16() for rows in p.hidden]
    p.head = p.head.detach().bfloat16()
    rounded = (part.bfloat16() for part in list(vars(p.teacher).values())[:3])
    p.teacher = Teacher(*rounded, DRAFT_IDS, p.teacher.token_ids)
    loss_settings = settings_of(kind, step_weights=(1.0, 1.0))
    plain = chunked(p, loss_settings)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = chunked(p, loss_settings)
    assert all(torch.equal(a, b) for a, b in zip(plain, mixed, strict=True))


@pytest.mark.parametrize("kind", ["kl", "reverse_kl", "jsd"])
def test_tiny_divergence_is_not_lost_in_rounding(kind):
    """A drafter that is nearly the target: the loss is 10,000 times smaller than its terms."""
    generator = torch.Generator().manual_seed(0)
    target_logits = torch.randn(50, 64, generator=generator)
    draft_logits = target_logits + 0.01 * torch.randn(50, 64, generator=generator)
    loss, _, _ = loss_and_gradient(draft_logits.clone(), chunk_of(target_logits, torch.arange(64)), settings_of(kind))
    exact = naive_loss(kind, draft_logits.double(), target_logits.double(), torch.arange(64))
    assert ((loss.double() - exact).abs() <= 1e-5 * exact).all()
