"""Training that starts from a head on disk: other code's names and conventions, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from conf import InputError
from tests.families import settings_of, tiny_family
from tests.train.conftest import Launcher
from train.warm_start import read_head

VOCAB = 258


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in tensors.items()}, str(folder / "model.safetensors")
    )
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def eagle3_folder(folder: Path, head: Any, config: dict[str, Any], layer: str = "midlayer.", **more: Tensor) -> str:
    """As SpecForge and EAGLE save one: offsets in d2t."""
    ids = head.draft_to_target_ids
    maps = {"d2t": ids - torch.arange(len(ids)), "t2d": torch.isin(torch.arange(VOCAB), ids)}
    named = {name.replace("midlayer.", layer): p.detach() for name, p in head.named_parameters()}
    return write(folder, {**named, **maps, **more}, config)


def start(path: str, target: Any, family: str, **settings: Any) -> Any:
    """What the trainer does."""
    head = read_head(path, settings_of(family).families())
    ids = head.draft_to_target_ids(VOCAB)
    drafter = tiny_family(family, target, seed=9, init_layer=None, **settings)
    drafter = drafter.settings.build(target.parts, ids)
    head.put_into(drafter, family)
    return drafter


def assert_same(ours: Any, theirs: Any) -> None:
    state = theirs.state_dict()
    assert ours.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in ours.state_dict().items())


@pytest.mark.parametrize(
    ("layer", "config"),
    [
        ("midlayer.", {}),
        ("midlayer.", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}),  # counts outputs
        ("layers.0.", {"eagle_aux_hidden_state_layer_ids": [2, 4, 5], "norm_before_residual": False}),
        ("layers.0.", {"speculators_model_type": "eagle3", "norm_before_residual": False}),
    ],
)
def test_eagle3_heads_of_others_start_as_they_are(
    tiny_target: Any, tmp_path: Path, layer: str, config: dict[str, Any]
) -> None:
    target = tiny_target()  # 8 layers: the default is (2, 4, 5)
    theirs = tiny_family("eagle3", target, 90, init_layer=None)
    folder = eagle3_folder(tmp_path / "head", theirs, config, layer, **{"embed_tokens.weight": target.embed_tokens})
    assert_same(start(folder, target, "eagle3"), theirs)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"speculators_model_type": "eagle3"}, "norm_before_residual=true"),  # speculators' default
        ({"norm_output": True}, r"set drafter\.norm_output=true"),
        ({"use_aux_norm": True}, r"set drafter\.fc_norm=true"),
        ({"norm_before_fc": True}, "norm_before_fc"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, r"set drafter\.aux_layers=\[1,3,4\]"),
        (
            {
                "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]},
            },
            "names its layers twice",
        ),
    ],
)
def test_eagle3_heads_of_other_conventions_are_refused(
    tiny_target: Any, tmp_path: Path, config: dict[str, Any], problem: str
) -> None:
    target = tiny_target()
    folder = eagle3_folder(tmp_path / "head", tiny_family("eagle3", target, 90, init_layer=None), config)
    with pytest.raises(InputError, match=problem):
        start(folder, target, "eagle3")


def test_embedding_of_another_target_is_refused(tiny_target: Any, tmp_path: Path) -> None:
    target = tiny_target()
    theirs = tiny_family("eagle3", target, 90, init_layer=None)
    folder = eagle3_folder(tmp_path / "head", theirs, {}, **{"embed_tokens.weight": target.embed_tokens + 1})
    with pytest.raises(InputError, match="embed_tokens"):
        start(folder, target, "eagle3")


def test_vocabulary_map_is_read_as_what_it_must_be_or_refused(tiny_target: Any, tmp_path: Path) -> None:
    target = tiny_target()
    theirs = tiny_family("eagle3", target, 4, init_layer=None)
    tensors = {name: p.detach() for name, p in theirs.named_parameters()}
    known = torch.isin(torch.arange(VOCAB), torch.tensor([0, 2, 4, 6]))
    cases = {
        "offsets": ({"d2t": torch.tensor([5, 5, 9, 9])}, [5, 6, 11, 12]),  # not ascending: offsets
        "absolute": ({"d2t": torch.tensor([3, 50, 200, 257])}, [3, 50, 200, 257]),  # as offsets beyond the vocabulary
        "told by t2d": ({"d2t": torch.tensor([0, 2, 4, 6]), "t2d": known}, [0, 2, 4, 6]),
        "whole": ({}, list(range(VOCAB))),
    }
    for name, (maps, expected) in cases.items():
        assert (
            read_head(write(tmp_path / name, tensors | maps, {}), ["eagle3"]).draft_to_target_ids(VOCAB).tolist()
            == expected
        )
    for name, maps in {
        "two readings": {"d2t": torch.tensor([0, 2, 4, 6])},
        "none": {"d2t": torch.tensor([0, 300, 2, 4])},
        "another t2d": {"d2t": torch.tensor([5, 5, 9, 9]), "t2d": known},
    }.items():
        with pytest.raises(InputError, match="d2t can be read as"):
            read_head(write(tmp_path / name, tensors | maps, {}), ["eagle3"]).draft_to_target_ids(VOCAB)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("form", ["FasterDecoding", "with prefix", "vLLM"])
def test_medusa_heads_of_others_start_as_they_are(tiny_target: Any, tmp_path: Path, form: str, own: bool) -> None:
    target = tiny_target()
    settings = {"num_heads": 3, "num_layers": 2, "own_lm_heads": own}
    theirs = tiny_family("medusa", target, **settings)
    stored: dict[str, Tensor] = {}
    for head in range(3):
        for layer in range(2):
            linear = theirs.blocks[head][layer].linear
            first = f"blocks.{head}.layers.{layer}" if form == "vLLM" else f"{head}.{layer}.linear"
            stored |= {f"{first}.weight": linear.weight.detach(), f"{first}.bias": linear.bias.detach()}
        weight = (theirs.lm_heads[head].weight if own else target.lm_head).detach()
        stored[f"lm_heads.{head}.weight" if form == "vLLM" else f"{head}.2.weight"] = weight
    if form == "with prefix":
        stored = {f"medusa_heads.{name}": tensor for name, tensor in stored.items()}
    assert_same(start(write(tmp_path / "head", stored, {}), target, "medusa", **settings), theirs)
    if own:
        with pytest.raises(InputError, match="own_lm_heads=true"):
            start(str(tmp_path / "head"), target, "medusa", num_heads=3, num_layers=2, own_lm_heads=False)


def test_medusa_blocks_without_bias_get_zeros(tiny_target: Any, tmp_path: Path) -> None:
    target = tiny_target()
    stored = {f"blocks.{head}.layers.0.weight": torch.randn(32, 32) for head in range(2)}
    drafter = start(write(tmp_path / "head", stored, {}), target, "medusa", num_heads=2)
    assert torch.equal(drafter.blocks[1][0].linear.weight, stored["blocks.1.layers.0.weight"])
    assert not drafter.blocks[0][0].linear.bias.any()


def test_eagle1_heads_of_others_start_as_they_are(tiny_target: Any, tmp_path: Path) -> None:
    target = tiny_target()
    theirs = tiny_family("eagle1", target, init_layer=None)
    stored = {name.replace("decoder_layer.", "layers.0."): p.detach() for name, p in theirs.named_parameters()}
    zeros = write(tmp_path / "zeros", stored | {"fc.bias": torch.zeros(32)}, {})
    assert_same(start(zeros, target, "eagle1"), theirs)
    with pytest.raises(InputError, match="bias"):
        start(write(tmp_path / "ones", stored | {"fc.bias": torch.ones(32)}, {}), target, "eagle1")


def test_head_of_another_shape_or_kind_is_refused(tiny_target: Any, tmp_path: Path) -> None:
    target = tiny_target()
    theirs = tiny_family("eagle3", target, 90, init_layer=None)
    extra = eagle3_folder(tmp_path / "extra", theirs, {}, **{"midlayer.self_attn.q_proj.bias": torch.zeros(32)})
    with pytest.raises(InputError, match=r"q_proj\.bias"):
        start(extra, target, "eagle3")
    with pytest.raises(InputError, match="does not fit"):
        start(extra, target, "medusa")
    with pytest.raises(InputError, match="cannot be read"):
        start(extra, target, "mtp")
    (tmp_path / "pickle").mkdir()
    (tmp_path / "pickle" / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(InputError, match="pickle"):
        read_head(str(tmp_path / "pickle"), ["eagle3"])


def test_run_goes_on_from_another_runs_head(
    launcher: Launcher, tiny_args: Callable[..., list[str]], tmp_path: Path
) -> None:
    launcher("train", tiny_args(tmp_path / "first"), tmp_path).succeeded()
    still = ["optim=adamw", "optim.lr=1e-12", "optim.weight_decay=0", "drafter.draft_vocab_size=150"]
    launcher(
        "train", tiny_args(tmp_path / "second", f"drafter.init_from={tmp_path / 'first'}", *still), tmp_path
    ).succeeded()
    first, second = (load_file(tmp_path / run / "checkpoints/latest/model.safetensors") for run in ("first", "second"))
    assert torch.equal(first["draft_to_target_ids"], second["draft_to_target_ids"])  # its own vocabulary: 200, not 150
    assert all(torch.allclose(second[name], tensor, atol=1e-8) for name, tensor in first.items())
    refused = launcher("train", tiny_args(tmp_path / "third", "drafter.init_from=nowhere"), tmp_path)
    assert refused.code == 2 and "nowhere" in refused.err
