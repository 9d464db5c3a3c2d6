"""Rounds in which no sequence has a draft: model-free proposers, at the start of text that does not repeat itself."""

from typing import Any

import pytest
import torch

from eval.generate import speculative_generate
from tests.eval.decoding import SAMPLED, decoding
from tests.eval.test_generate import MODEL_FREE
from train.drafters.base import chain


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("name", MODEL_FREE)
def test_sampling_goes_on_where_no_text_repeats_itself(tiny_target: Any, name: str, rule: str) -> None:
    target = tiny_target("llama", torch.float64)
    proposer: Any = MODEL_FREE[name].build(target.parts, torch.arange(0))
    generator = torch.Generator().manual_seed(0)
    found = speculative_generate(target, proposer, [[3, 17]], decoding(chain(3), 9, SAMPLED, rule=rule), generator)
    assert found.answers[0].rounds[0].num_drafted == 0
    assert 0 < len(found.answers[0].tokens) <= 9
