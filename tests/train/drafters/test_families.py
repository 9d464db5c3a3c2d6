"""What must hold for the training of every family: alignment, no leaks, saving, FLOPs."""

import dataclasses
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from data.batch import Batch
from tests.families import NAMES, longest_chain, settings_of, tiny_family
from tests.train.drafters.test_eagle3 import batch_of

K = 3
EVERYTHING = {"row_keep_ratio": 1.0}
"""All rows, so that each label is taught by every step."""


def only(batch: Batch, label: int) -> Batch:
    """The same text, of which one token counts."""
    weights = torch.zeros_like(batch.token_weights)
    weights.view(-1)[label] = 1
    return dataclasses.replace(batch, token_weights=weights)


def results(drafter: Any, target: Any, batch: Batch) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        return tuple(vars(drafter.loss(batch, target.capture(batch, drafter.wants))).values())


def with_token(batch: Batch, row: int) -> Batch:
    ids = batch.input_ids.clone()
    ids.view(-1)[row] = (ids.view(-1)[row] + 1) % 256
    return dataclasses.replace(batch, input_ids=ids)


@pytest.fixture(scope="module")
def target(tiny_target: Any) -> Any:
    return tiny_target("llama", torch.float64)


@pytest.mark.parametrize("name", NAMES)
def test_loss_of_a_token_sees_what_comes_before_it_in_its_document_and_nothing_else(target: Any, name: str) -> None:
    drafter = tiny_family(name, target, 200, **EVERYTHING)
    batch = batch_of([(4, 9), (3, 6)])
    label = 10  # of the first document, rows 0..12
    expected = results(drafter, target, only(batch, label))
    for row in (label, label + 1, 12, 13, 17, 21):  # a hard label is the token itself: none of these yamls uses one
        found = results(drafter, target, only(with_token(batch, row), label))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), row
    for row in (0, 5, label - 2, label - 1):
        assert float(results(drafter, target, only(with_token(batch, row), label))[0]) != float(expected[0]), row


@pytest.mark.parametrize("name", NAMES)
def test_training_judges_what_greedy_drafts_are_made_of(tiny_target: Any, name: str) -> None:
    """Each step's agreement with the target is that of the drafts which the round-walk walks over."""
    vocab = 6  # so few that chance alone makes drafter and target agree now and then
    target = tiny_target("llama", torch.float64, vocab_size=vocab)
    drafter = tiny_family(name, target, **EVERYTHING)
    batch = batch_of([(4, 20), (3, 18)])
    batch = dataclasses.replace(batch, input_ids=batch.input_ids % vocab)
    features = target.capture(batch, drafter.wants)
    best = target.logits(features.last_hidden_state).argmax(-1).flatten()
    drafts = drafter.greedy_drafts(batch, features, longest_chain(drafter, K))[0]
    agreed = []
    for label in [*range(6, 24), *range(29, 45)]:
        _, _, matches = results(drafter, target, only(batch, label))
        for step in range(min(len(matches), drafts.shape[1])):
            if batch.loss_mask.view(-1)[label - 1 - step : label + 1].all():
                agreed.append(int(drafts[label - 2 - step, step]) == int(best[label - 1]))
                assert float(matches[step]) == agreed[-1], (label, step)
    assert 0 < sum(agreed) < len(agreed)


@pytest.mark.parametrize("name", NAMES)
def test_state_is_all_that_training_changes(target: Any, name: str) -> None:
    trained, other = (tiny_family(name, target, 100, noise=noise) for noise in (0.2, 0.1))
    batch = batch_of([(2, 9)])
    features = target.capture(batch, trained.wants)
    drafts = trained.greedy_drafts(batch, features, longest_chain(trained, K))
    assert not torch.equal(other.greedy_drafts(batch, features, longest_chain(other, K)), drafts)
    other.load_state_dict({key: tensor.clone() for key, tensor in trained.state_dict().items()})
    assert torch.equal(other.greedy_drafts(batch, features, longest_chain(other, K)), drafts)
    assert torch.isin(drafts, trained.draft_to_target_ids).all()
    shared = {tensor.data_ptr() for tensor in target.model.parameters()}
    held = {key for key, tensor in trained.state_dict().items() if tensor.data_ptr() in shared}
    assert held == set()  # the target's weights are in no checkpoint


@pytest.mark.parametrize("name", NAMES)
def test_float32_weights_beside_a_bfloat16_target_train_and_validate(tiny_target: Any, name: str) -> None:
    """As in training: matrix products in bfloat16 by autocast, and none of that in validation."""
    target = tiny_target("llama", torch.bfloat16)
    drafter: Any = settings_of(name, draft_vocab_size=90).build(target.parts, torch.arange(90))
    assert {p.dtype for p in drafter.parameters()} == {torch.float32}
    batch = batch_of([(3, 9)])
    features = target.capture(batch, drafter.wants)
    with torch.autocast("cpu", torch.bfloat16):
        drafter.loss(batch, features).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in drafter.parameters() if p.requires_grad)
    assert drafter.greedy_drafts(batch, features, longest_chain(drafter, K)).shape == (1, 12, longest_chain(drafter, K))


@pytest.mark.parametrize("name", NAMES)
def test_flops_are_those_that_torch_counts(tiny_target: Any, name: str) -> None:
    """At least what the formulas need, and not half as much again: implementations compute some things twice."""
    target = tiny_target()
    drafter = tiny_family(name, target, 200)
    batch = batch_of([(20, 90), (20, 70)])
    features = target.capture(batch, drafter.wants)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # fused kernels are not counted
        drafter.loss(batch, features).loss.backward()
    assert 1 <= counter.get_total_flops() / drafter.flops(batch) < 1.5
