"""An export is a head that training can start from: `drafter.init_from=` makes the same drafter of it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families import settings_of
from tests.serve_export.exports import CASES, drafter_of, export
from train.warm_start import read_head

READ = [case for case, (_, name, _) in CASES.items() if not name.endswith("gguf") and name != "causal-lm"]


@pytest.mark.parametrize("case", READ)
def test_export_starts_the_same_drafter(tiny_target: Any, tmp_path: Path, case: str) -> None:
    family, name, settings = CASES[case]
    target = tiny_target("llama")
    theirs = drafter_of(family, target, **settings)
    export(target, theirs, name, tmp_path / "head")
    head = read_head(str(tmp_path / "head"), settings_of(family).families())
    chosen = {key: value for key, value in settings.items() if key != "draft_vocab_size"}
    ours = drafter_of(family, target, seed=9, **chosen).settings.build(
        target.parts, head.draft_to_target_ids(target.hf_config.vocab_size)
    )
    head.put_into(ours, family)
    state = theirs.state_dict()
    assert ours.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[key]) for key, tensor in ours.state_dict().items())


def test_draft_model_is_an_ordinary_model(tiny_target: Any, tmp_path: Path) -> None:
    target = tiny_target("qwen3", layer_types=["full_attention"] * 8)
    theirs = drafter_of("draft_model", target, num_layers=2)
    export(target, theirs, "causal-lm", tmp_path / "head")
    again = settings_of("draft_model", path=str(tmp_path / "head"), num_layers=None)
    ours = again.build(target.parts, torch.arange(258))
    assert isinstance(ours, torch.nn.Module)
    state = theirs.state_dict()
    assert all(torch.equal(tensor, state[key]) for key, tensor in ours.state_dict().items())
