"""`earlier_state_ratio`: which states a training step reads instead of the last step's."""

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.families import tiny_family
from tests.train.drafters.test_eagle3 import batch_of
from train.drafters.fed_back import _some_earlier
from train.drafters.rows import chain_labels

STEP = 3


def states(rows: Tensor, step: int) -> Tensor:
    """States that say where they come from."""
    return torch.stack([rows, torch.full_like(rows, step)], dim=-1).double()


@pytest.mark.parametrize("ratio", [0.4, 1.0])
def test_replaced_states_are_of_earlier_steps_and_the_same_place(ratio: float) -> None:
    batch = batch_of([(5, 300), (5, 400)])
    batch = dataclasses.replace(batch, uniforms=torch.rand(batch.uniforms.shape, generator=torch.manual_seed(0)))
    labels = chain_labels(batch, STEP + 1, 0.9)
    rows = [labels.rows(step) for step in range(STEP + 1)]
    own = states(rows[STEP], STEP - 1)
    found = _some_earlier(own, [states(part, k) for k, part in enumerate(rows)], rows, STEP, batch, ratio)
    assert torch.equal(found.sum(-1), own.sum(-1))  # row + step: the place in the text
    counts = Counter(found[:, 1].long().tolist())
    kept = (1.0 + 0.9) / 2  # step 0 has all rows, step 1 a tenth less
    assert counts[STEP - 1] / len(own) == pytest.approx(1 - ratio * kept, abs=0.05)
    assert counts[0] > 0 and counts[1] > 0
    documents = batch.document_ids.flatten()
    assert torch.equal(documents[found[:, 0].long()], documents[rows[STEP]])


def test_training_reads_them_and_drafts_do_not(tiny_target: Any) -> None:
    target = tiny_target("llama", torch.float64)
    batch = batch_of([(4, 40)])
    batch = dataclasses.replace(batch, uniforms=torch.rand(batch.uniforms.shape, generator=torch.manual_seed(0)))
    plain, mixed = (
        tiny_family("mtp", target, row_keep_ratio=1.0, earlier_state_ratio=ratio, ttt_steps=4) for ratio in (0.0, 0.8)
    )
    features = target.capture(batch, plain.wants)
    ours, theirs = (drafter.loss(batch, features).step_losses for drafter in (mixed, plain))
    assert torch.equal(ours[:2], theirs[:2])  # the second step has only the first one's states
    assert (ours[2:] != theirs[2:]).all()
    assert torch.equal(mixed.greedy_drafts(batch, features, 4), plain.greedy_drafts(batch, features, 4))
