"""Loss and gradients do not depend on which documents share a pack."""

from typing import Any

import pytest
import torch
from torch import Tensor

from data.batch import Batch
from tests.families import NAMES, tiny_family
from tests.train.drafters.test_eagle3 import assert_relative, batch_of


def assert_packing_changes_nothing(drafter: Any, target: Any) -> dict[str, Tensor]:
    """Loss, matches and gradients of two packs are the sums over their documents alone; returns the gradients."""
    batch = batch_of([(2, 5), (1, 3, 1, 3)], [(3, 7)], width=17)
    packed = drafter.loss(batch, target.capture(batch, drafter.wants))
    packed.loss.backward()
    trained = {name: p for name, p in drafter.named_parameters() if p.requires_grad}
    gradients = {name: p.grad.clone() for name, p in trained.items()}
    drafter.zero_grad()
    parts = []
    for start, end in batch.document_spans():
        alone = Batch(**{name: tensor.flatten()[None, start:end] for name, tensor in vars(batch).items()})
        parts.append(drafter.loss(alone, target.capture(alone, drafter.wants)))
        parts[-1].loss.backward()
    for name in ("loss", "step_losses", "step_matches"):
        assert_relative(getattr(packed, name).detach(), sum(getattr(part, name).detach() for part in parts))
    for name, parameter in trained.items():
        assert_relative(parameter.grad, gradients[name])
    return gradients


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_do_not_depend_on_packing(tiny_target: Any, name: str) -> None:
    target = tiny_target("llama", torch.float64)
    gradients = assert_packing_changes_nothing(tiny_family(name, target, 90), target)
    assert all(float(gradient.norm()) > 0 for gradient in gradients.values())
    assert all(p.grad is None for p in target.model.parameters())


def test_nor_do_they_in_float32(tiny_target: Any, tiny_drafter: Any) -> None:
    target = tiny_target()
    drafter = tiny_drafter(target, draft_vocab_size=90)
    assert assert_packing_changes_nothing(drafter, target).keys() == dict(drafter.named_parameters()).keys()
