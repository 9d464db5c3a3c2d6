"""The independent readers of exported files compute what the drafters compute, and would notice if they did not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from conf import InputError
from serve_export.check import compare_logits
from serve_export.readers.eagle3 import Eagle3
from serve_export.readers.layer import angles
from tests.serve_export.exports import CASES, LLAMA3_ROPE, drafter_of, export

K = 3
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "another rope base": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "one key head": ("llama", {"num_key_value_heads": 1}),
    "wide heads": ("llama", {"head_dim": 16}),
}


def written(tiny_target: Any, folder: Path, case: str, kind: str = "llama", dtype: str = "float32", **more: Any) -> Any:
    """(loaded, source, format) of one case beside one kind of target."""
    family, name, settings = CASES[case]
    architecture, shape = TARGETS[kind]
    target = tiny_target(architecture, **shape)
    drafter = drafter_of(family, target, **{**settings, **more})
    return (*export(target, drafter, name, folder, dtype, K), name)


@pytest.mark.parametrize("case", CASES)
def test_reader_agrees_with_the_drafter(tiny_target: Any, tmp_path: Path, case: str) -> None:
    loaded, source, name = written(tiny_target, tmp_path / "head", case)
    difference = compare_logits(loaded, source, name, loaded.folder)
    assert difference is not None  # and at most TOLERANCE, else it raises


@pytest.mark.parametrize("case", ["eagle3", "speculators", "eagle1", "medusa", "draft model"])
@pytest.mark.parametrize("kind", TARGETS)
def test_reader_agrees_beside_every_kind_of_target(tiny_target: Any, tmp_path: Path, case: str, kind: str) -> None:
    # Less noise: EAGLE-1 norms nothing, and in float32 the error of random weights grows with its states.
    loaded, source, name = written(tiny_target, tmp_path / "head", case, kind, noise=0.1)
    difference = compare_logits(loaded, source, name, loaded.folder)
    assert difference is not None


@pytest.mark.parametrize("kind", ["another rope base", "llama3 rope", "one key head", "wide heads"])
def test_llama_cpp_reader_agrees_beside_every_kind_of_target(tiny_target: Any, tmp_path: Path, kind: str) -> None:
    loaded, source, name = written(tiny_target, tmp_path / "head", "gguf", kind)
    difference = compare_logits(loaded, source, name, loaded.folder)
    assert difference is not None


@pytest.mark.parametrize("case", CASES)
def test_export_in_bfloat16_is_the_rounded_drafter(tiny_target: Any, tmp_path: Path, case: str) -> None:
    loaded, source, name = written(tiny_target, tmp_path / "head", case, dtype="bfloat16")
    difference = compare_logits(loaded, source, name, loaded.folder)
    assert difference is not None


def test_draft_ids_are_offset_to_target_ids(tmp_path: Path) -> None:
    config = {
        "draft_vocab_size": 3, "rope_scaling": None, "rope_theta": 1.0, "head_dim": 2, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    stored = {"d2t": torch.tensor([1, 1, 3]), "norm.weight": torch.ones(2, dtype=torch.bfloat16)}
    reader = Eagle3(config, stored, torch.zeros(6, 2))
    assert reader.target_ids.tolist() == [1, 2, 5]
    assert reader.weights["norm.weight"].dtype == torch.float32
    del stored["d2t"]
    assert Eagle3(config, stored, torch.zeros(6, 2)).target_ids.tolist() == [0, 1, 2]


def test_angles_of_scaled_positions_by_hand() -> None:
    plain = angles({"rope_type": "default", "rope_theta": 100.0}, 4, 3)
    torch.testing.assert_close(plain, torch.tensor([[0.0, 0.0], [1.0, 0.1], [2.0, 0.2]]))
    slow = angles({"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}, 4, 2)
    torch.testing.assert_close(slow[1], torch.tensor([0.25, 0.025]))
    # Waves of 2 pi = 6.28 and 62.8 positions: the first is shorter than 64 / 4, the second longer than 64 / 2.
    llama3 = {**LLAMA3_ROPE, "rope_theta": 100.0, "low_freq_factor": 2.0}
    torch.testing.assert_close(angles(llama3, 4, 2)[1], torch.tensor([1.0, 0.1 / 8]))


def swap_halves(tensor: Tensor) -> Tensor:
    left, right = tensor.chunk(2, dim=-1)
    return torch.cat([right, left], dim=-1)


SPOILT: list[tuple[str, str, Callable[[Tensor], Tensor]]] = [
    ("eagle3", "d2t", torch.zeros_like),  # the wrong embedding from the second draft on
    ("eagle3", "fc.weight", swap_halves),
    ("eagle3", "midlayer.self_attn.q_proj.weight", swap_halves),  # hidden before embedding
    ("eagle3", "midlayer.self_attn.o_proj.weight", lambda tensor: tensor.T.contiguous()),
    ("eagle3", "lm_head.weight", lambda tensor: tensor.roll(1, 0)),
    ("eagle3", "midlayer.hidden_norm.weight", torch.ones_like),
    ("eagle3", "midlayer.input_layernorm.weight", torch.ones_like),
    ("eagle3", "midlayer.post_attention_layernorm.weight", torch.ones_like),
    ("eagle3", "norm.weight", torch.ones_like),
    ("eagle3, qwen3 layer", "midlayer.self_attn.q_norm.weight", torch.ones_like),
    ("eagle3, qwen3 layer", "midlayer.self_attn.k_norm.weight", torch.ones_like),
    ("speculators", "embed_tokens.weight", lambda tensor: tensor.roll(1, 0)),
    ("eagle1", "fc.weight", swap_halves),
    ("eagle1", "layers.0.self_attn.o_proj.weight", lambda tensor: tensor.T.contiguous()),
    ("medusa", "blocks.1.layers.0.weight", lambda tensor: tensor.T.contiguous()),
    ("medusa", "blocks.2.layers.1.bias", torch.zeros_like),
    ("medusa", "lm_heads.0.weight", lambda tensor: tensor.roll(1, 0)),
    ("draft model", "model.layers.1.self_attn.o_proj.weight", lambda tensor: tensor.T.contiguous()),
]


@pytest.mark.parametrize(("case", "tensor", "spoil"), SPOILT, ids=[f"{case}: {name}" for case, name, _ in SPOILT])
def test_export_check_refuses_a_spoilt_tensor(
    tiny_target: Any, tmp_path: Path, case: str, tensor: str, spoil: Callable[[Tensor], Tensor]
) -> None:
    loaded, source, name = written(tiny_target, tmp_path / "head", case)
    path = loaded.folder / "model.safetensors"
    tensors = load_file(path)
    tensors[tensor] = spoil(tensors[tensor])
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(InputError, match="exported head and trained drafter differ"):
        compare_logits(loaded, source, name, loaded.folder)


@pytest.mark.parametrize(
    ("case", "key", "value"),
    [
        ("eagle3", "norm_output", True), ("eagle3", "norm_before_residual", True), ("eagle3", "rope_theta", 500.0),
        ("eagle1", "rope_theta", 500.0), ("medusa", "medusa_fc_bias", False),
    ],
)  # fmt: skip
def test_export_check_refuses_a_wrong_fact(tiny_target: Any, tmp_path: Path, case: str, key: str, value: Any) -> None:
    loaded, source, name = written(tiny_target, tmp_path / "head", case)
    path = loaded.folder / "config.json"
    config = json.loads(path.read_text())
    assert config[key] != value
    path.write_text(json.dumps(config | {key: value}))
    with pytest.raises(InputError, match="exported head and trained drafter differ"):
        compare_logits(loaded, source, name, loaded.folder)


def test_export_check_refuses_the_head_of_another_seed(tiny_target: Any, tmp_path: Path) -> None:
    loaded, source, name = written(tiny_target, tmp_path / "head", "eagle3")
    other, _, _ = written(tiny_target, tmp_path / "other", "eagle3", seed=1)
    with pytest.raises(InputError, match="exported head and trained drafter differ"):
        compare_logits(loaded, source, name, other.folder)


def test_export_check_does_not_claim_to_know_every_rope(tiny_target: Any, tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
    target = tiny_target("llama", rope_parameters=yarn)
    drafter = drafter_of("eagle3", target, draft_vocab_size=50)
    loaded, source = export(target, drafter, "eagle3", tmp_path / "head")
    assert compare_logits(loaded, source, "eagle3", loaded.folder) is None


def test_rounding_for_the_comparison_leaves_the_target_as_it_is(tiny_target: Any, tmp_path: Path) -> None:
    target = tiny_target("llama")
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    drafter = drafter_of("eagle1", target)
    loaded, source = export(target, drafter, "eagle1", tmp_path / "head", "bfloat16")
    compare_logits(loaded, source, "eagle1", loaded.folder)
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.model.state_dict().items())
