"""The FLOP formulas against torch's own count of what ran."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from data import blocked_attention
from tests.train.drafters.test_eagle3 import batch_of


def count(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@pytest.mark.parametrize("loss", ["kl", "lk_alpha"])
@pytest.mark.parametrize("train_lm_head", [True, False])
@pytest.mark.parametrize("row_keep_ratio", [1.0, 0.5])
def test_formula_counts_what_a_step_runs(monkeypatch, tiny_target, tiny_drafter, loss, train_lm_head, row_keep_ratio):
    monkeypatch.setattr(blocked_attention, "BLOCK_ROWS", 1)  # so that no block looks at keys in vain
    target = tiny_target("llama")
    drafter = tiny_drafter(
        target, draft_vocab_size=90, loss=loss, train_lm_head=train_lm_head, row_keep_ratio=row_keep_ratio
    )
    drafter.lm_head.requires_grad_(train_lm_head)
    batch = batch_of([(3, 5), (1, 13, 1, 4)], [(2, 6, 2)], width=27)
    features = target.capture(batch, drafter.wants)

    def step():
        drafter.loss(batch, features).loss.backward()

    ran = count(step)

    labels_of = [set(), set(), set()]  # rows of each step, by the rule: x_{t+1}..x_{t+2+k} are one answer
    for start, end in batch.document_spans():
        mask = batch.loss_mask.flatten()[start:end]
        for step in range(3):
            for t in range(end - start - 2 - step):
                kept = batch.uniforms.flatten()[start + t] < row_keep_ratio**step
                if mask[t + 1 : t + 3 + step].all() and kept:
                    labels_of[step].add(start + t)
    depth = (batch.position_ids + 1).flatten()
    pairs = sum(int(depth[t]) for rows in labels_of for t in rows)
    width = drafter.midlayer.num_heads * drafter.midlayer.head_dim
    scores_made_anew = 2 * width * pairs
    tables = [
        torch.zeros(54, dtype=torch.int64),
        *(torch.zeros(len(rows), dtype=torch.int64) for rows in labels_of[1:]),
    ]
    positions = count(lambda: [drafter.rotary.table(rows) for rows in tables])  # an outer product, no model FLOPs
    assert ran - scores_made_anew - positions == drafter.flops(batch)
