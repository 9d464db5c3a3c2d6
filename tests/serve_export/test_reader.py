"""The independent reader of exported folders computes what the drafter computes, and would notice if it did not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from conf import InputError
from data.batch import TargetFeatures
from serve_export import to_vllm
from serve_export.check import compare_logits
from serve_export.reader import ExportedEagle3
from train.checkpoint import LoadedDrafter
from train.drafters.base import chain

K = 5
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
HEADS: dict[str, dict[str, Any]] = {
    "reduced vocabulary": {},
    "full vocabulary": {"size": None},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "norm_before_residual": {"norm_before_residual": True},
    "all three": {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
    "two layers": {"aux_layers": (1, 7)},
    "rope base": {"shape": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}},
    "qwen3": {"family": "qwen3"},
    "qwen3_moe": {"family": "qwen3_moe"},
    "one key head": {"shape": {"num_key_value_heads": 1}},
    "wide heads": {"shape": {"head_dim": 16}},
}


@pytest.fixture
def make_loaded(
    tiny_target: Callable[..., Any], tiny_drafter: Callable[..., Any], tmp_path: Path
) -> Callable[..., Any]:
    """make_loaded(..., **drafter overrides) -> LoadedDrafter whose folder is its export."""

    def make(
        size: int | None = 50,
        shape: Any = None,
        family: str = "llama",
        dtype: str = "float32",
        rounded: bool = False,
        **overrides: Any,
    ) -> LoadedDrafter:
        target = tiny_target(family, **(shape or {}))
        if rounded:  # a target that is stored in bfloat16, as most are
            for parameter in target.model.parameters():
                parameter.copy_(parameter.bfloat16().float())
        drafter = tiny_drafter(target, size, **overrides).requires_grad_(False)
        servable = drafter.to_serving()
        tensors = to_vllm.tensors(servable, target.hf_config.vocab_size, getattr(torch, dtype))
        save_file(tensors, str(tmp_path / "model.safetensors"))
        (tmp_path / "config.json").write_text(json.dumps(to_vllm.config(servable, target, dtype)))
        unused: Any = None
        return LoadedDrafter(tmp_path, drafter, unused, target, unused, {})

    return make


def draft_greedily(loaded: Any, aux: Tensor, next_ids: Tensor) -> Tensor:
    """(K, Vd) logits that the drafter's own `propose` chose from."""
    state = loaded.drafter.start([[0]], len(next_ids) + K)
    loaded.drafter.observe(state, TargetFeatures(aux[None], None), next_ids[None], torch.tensor([len(next_ids)]))
    seen: list[Tensor] = []

    def best(logits: Tensor) -> Tensor:
        seen.append(logits[0])
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()

    loaded.drafter.propose(state, chain(K), best, None)
    return torch.stack(seen)


@pytest.mark.parametrize("head", HEADS)
def test_reader_agrees_with_the_drafter(make_loaded: Any, head: str) -> None:
    loaded = make_loaded(**HEADS[head])
    reader = ExportedEagle3(loaded.folder, loaded.target.embed_tokens)
    generator = torch.Generator().manual_seed(5)
    aux = torch.randn(17, len(loaded.drafter.wants.aux_layers) * 32, generator=generator)
    next_ids = torch.randint(258, (17,), generator=generator)
    theirs = reader.draft_logits(aux, next_ids, K)
    ours = draft_greedily(loaded, aux, next_ids)
    assert ours.shape == theirs.shape == (K, HEADS[head].get("size", 50) or 258)
    assert theirs.std() > 0.1
    assert (ours - theirs).abs().max() < 2e-5 * theirs.abs().max()  # two float32 implementations


def test_draft_ids_are_offset_to_target_ids(tmp_path: Path) -> None:
    tensors = {"d2t": torch.tensor([1, 1, 3]), "norm.weight": torch.ones(2, dtype=torch.bfloat16)}
    save_file(tensors, str(tmp_path / "model.safetensors"))
    (tmp_path / "config.json").write_text('{"draft_vocab_size": 3, "rope_scaling": null}')
    reader = ExportedEagle3(tmp_path, torch.zeros(6, 2))
    assert reader.target_ids.tolist() == [1, 2, 5]
    assert reader.weights["norm.weight"].dtype == torch.float32


def test_draft_ids_are_target_ids_without_a_mapping(tmp_path: Path) -> None:
    save_file({"norm.weight": torch.ones(2)}, str(tmp_path / "model.safetensors"))
    (tmp_path / "config.json").write_text('{"draft_vocab_size": 4, "rope_scaling": null}')
    assert ExportedEagle3(tmp_path, torch.zeros(4, 2)).target_ids.tolist() == [0, 1, 2, 3]


FAITHFUL = ["reduced vocabulary", "full vocabulary", "all three", "rope base", "qwen3_moe"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head", FAITHFUL)
def test_export_check_passes_for_faithful_exports(make_loaded: Any, head: str, dtype: str) -> None:
    loaded = make_loaded(dtype=dtype, rounded=dtype == "bfloat16", **HEADS[head])
    difference = compare_logits(loaded, loaded.folder, K)
    assert difference is not None
    assert difference < 1e-4


@pytest.mark.parametrize("head", FAITHFUL)
def test_export_check_passes_in_bfloat16_beside_a_float32_target(make_loaded: Any, head: str) -> None:
    loaded = make_loaded(dtype="bfloat16", **HEADS[head])
    assert compare_logits(loaded, loaded.folder, K) is not None


def spoil_config(folder: Path, key: str, value: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config[key] != value
    (folder / "config.json").write_text(json.dumps(config | {key: value}))


@pytest.mark.parametrize(
    ("key", "value"), [("norm_output", True), ("norm_before_residual", True), ("rope_theta", 500.0)]
)
def test_export_check_refuses_a_wrong_fact(make_loaded: Any, key: str, value: Any) -> None:
    loaded = make_loaded()
    spoil_config(loaded.folder, key, value)
    with pytest.raises(InputError, match="exported head and trained drafter differ"):
        compare_logits(loaded, loaded.folder, K)


def swap_halves(tensor: Tensor) -> Tensor:
    left, right = tensor.chunk(2, dim=-1)
    return torch.cat([right, left], dim=-1)


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("d2t", torch.zeros_like),  # the wrong embedding from the second draft on
        ("fc.weight", swap_halves),
        ("midlayer.self_attn.q_proj.weight", swap_halves),  # hidden before embedding
        ("midlayer.self_attn.o_proj.weight", lambda tensor: tensor.T.contiguous()),
        ("lm_head.weight", lambda tensor: tensor.roll(1, 0)),
        ("midlayer.hidden_norm.weight", torch.ones_like),
        ("midlayer.input_layernorm.weight", torch.ones_like),
        ("midlayer.post_attention_layernorm.weight", torch.ones_like),
        ("norm.weight", torch.ones_like),
    ],
)
def test_export_check_refuses_a_spoilt_tensor(make_loaded: Any, name: str, spoil: Callable[[Tensor], Tensor]) -> None:
    loaded = make_loaded()
    path = loaded.folder / "model.safetensors"
    tensors = load_file(path)
    tensors[name] = spoil(tensors[name])
    save_file(tensors, path)
    with pytest.raises(InputError, match="exported head and trained drafter differ"):
        compare_logits(loaded, loaded.folder, K)


def test_export_check_refuses_the_head_of_another_seed(make_loaded: Any) -> None:
    loaded, other = make_loaded(), make_loaded(seed=1)  # the folder now holds seed 1
    assert loaded.folder == other.folder
    with pytest.raises(InputError, match="exported head and trained drafter differ"):
        compare_logits(loaded, loaded.folder, K)


def test_export_check_does_not_claim_to_know_scaled_rope(make_loaded: Any) -> None:
    loaded = make_loaded(shape={"rope_parameters": LLAMA3_ROPE})
    assert compare_logits(loaded, loaded.folder, K) is None


def test_reader_refuses_scaled_rope(make_loaded: Any) -> None:
    loaded = make_loaded(shape={"rope_parameters": LLAMA3_ROPE})
    with pytest.raises(InputError, match="plain rotary positions only"):
        ExportedEagle3(loaded.folder, loaded.target.embed_tokens)
