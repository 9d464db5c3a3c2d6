"""The peers' own code and ours read each other's heads, and compute the same: `make test-peers`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.batch import TargetFeatures
from data.encode import Document
from data.packing import collate_alone
from tests.peers_environment import run_peers
from tests.serve_export.exports import VOCAB, drafter_of, export
from train.warm_start import read_head

pytestmark = pytest.mark.peers
ROWS, WIDTH = 20, 32


def probe(folder: Path) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    tensors = {
        "hidden_states": torch.randn(ROWS, 3 * WIDTH, generator=generator),
        "next_ids": torch.randint(VOCAB, (ROWS,), generator=generator),
    }
    save_file(tensors, str(folder / "probe.safetensors"))
    return tensors


def theirs(folder: Path, mode: str, head: Path, *target: str) -> dict[str, Tensor]:
    run_peers("heads.py", mode, head, folder / "probe.safetensors", folder / "out", *target)
    return load_file(folder / "out")


def ours(drafter: Any, asked: dict[str, Tensor], steps: int) -> dict[str, Tensor]:
    """Logits of the training-time-test steps at the same rows."""
    ids = [0, *asked["next_ids"].tolist()]
    batch = collate_alone(Document(ids, [False] + [True] * ROWS, "probe"), ROWS + 1)
    aux = torch.cat([asked["hidden_states"], torch.zeros(1, 3 * WIDTH)])[None]
    features = TargetFeatures(aux, torch.zeros(1, ROWS + 1, WIDTH))
    rows = [torch.arange(ROWS - step) for step in range(steps)]
    with torch.no_grad():
        streams = drafter._unroll(batch, features, rows)
        return {f"step{step}": drafter.logits(stream) for step, stream in enumerate(streams)}


def require_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for step, logits in ours.items():
        other = theirs[step][: len(logits)]
        assert logits.std() > 0.1
        assert (logits - other).abs().max() < 1e-4 * logits.std(), step


@pytest.mark.parametrize(
    "settings",
    [
        {"draft_vocab_size": 50}, {}, {"draft_vocab_size": 50, "norm_before_residual": True},
        {"draft_vocab_size": 50, "fc_norm": True, "norm_output": True}, {"draft_vocab_size": 50, "qk_norm": True},
    ],
)  # fmt: skip
def test_speculators_loads_our_export(tiny_target: Any, tmp_path: Path, settings: dict[str, Any]) -> None:
    target = tiny_target("llama")
    drafter = drafter_of("eagle3", target, **settings)
    export(target, drafter, "eagle3-speculators", tmp_path / "head")
    asked = probe(tmp_path)
    require_same(ours(drafter, asked, 2), theirs(tmp_path, "load", tmp_path / "head"))


@pytest.mark.parametrize(
    ("mode", "settings", "steps"),
    [("write", {"norm_before_residual": True, "norm_output": True}, 2), ("specforge", {}, 1)],
)
def test_we_start_from_what_they_write(
    tiny_target: Any, tmp_path: Path, mode: str, settings: dict[str, Any], steps: int
) -> None:
    target = tiny_target("llama")
    asked = probe(tmp_path)
    logits = theirs(tmp_path, mode, tmp_path / "head", target.folder)
    head = read_head(str(tmp_path / "head"), ["eagle3"])
    ids = head.draft_to_target_ids(VOCAB)
    drafter = drafter_of("eagle3", target, **settings).settings.build(target.parts, ids)
    head.put_into(drafter, "eagle3")
    require_same(ours(drafter, asked, steps), logits)
