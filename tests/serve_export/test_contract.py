"""Every fault that engines would serve without a word is refused by name before an export gets its own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from conf import InputError
from serve_export.formats import FORMATS
from serve_export.source import Source
from serve_export.tables import TABLES
from serve_export.writers import eagle3
from tests.serve_export.exports import LLAMA3_ROPE

LAYER = "midlayer.self_attn."
REQUIRED = [
    "d2t", "fc.weight", "lm_head.weight", "midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight",
    "midlayer.mlp.down_proj.weight", "midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight",
    "midlayer.post_attention_layernorm.weight", f"{LAYER}k_proj.weight", f"{LAYER}o_proj.weight",
    f"{LAYER}q_proj.weight", f"{LAYER}v_proj.weight", "norm.weight", "t2d",
]  # fmt: skip
NOT_SQUARE = [name for name in REQUIRED if "norm" not in name and name not in ("d2t", "t2d", f"{LAYER}o_proj.weight")]


class Export:
    """The parts of an exported folder, to be spoilt before they are written."""

    def __init__(self, target: Any, drafter: Any, dtype: Any = "float32") -> None:
        source = Source(drafter.to_serving(), target, dtype, 3)
        self.tensors, self.config, self.known = eagle3.tensors(source), eagle3.config(source), source.known()

    def write(self, folder: Path) -> Path:
        folder.mkdir(exist_ok=True)
        save_file(self.tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.config))
        return folder

    def faults(self, folder: Path) -> list[str]:
        return FORMATS["eagle3"].faults(self.write(folder), self.known)

    def verify(self, folder: Path) -> None:
        assert self.faults(folder) == []

    def fault(self, folder: Path) -> str:
        found = self.faults(folder)
        assert found
        return "; ".join(found)


@pytest.fixture(scope="module")
def make_export(tiny_target: Callable[..., Any], tiny_drafter: Callable[..., Any]) -> Callable[..., Export]:
    """make_export(draft_vocab_size, target overrides, dtype, **drafter overrides)."""
    default = tiny_target("llama")

    def make(size: int | None = 50, shape: Any = None, dtype: str = "float32", **overrides: Any) -> Export:
        target = default if shape is None else tiny_target("llama", **shape)
        return Export(target, tiny_drafter(target, size, **overrides), dtype)

    return make


@pytest.fixture
def export(make_export: Any) -> Export:
    """The default head; its draft ids differ from 0..49."""
    made: Export = make_export()
    assert int(made.tensors["d2t"].max()) > 0
    return made


@pytest.mark.parametrize(
    "options",
    [
        {}, {"size": None}, {"dtype": "bfloat16"}, {"fc_norm": True}, {"norm_output": True},
        {"norm_before_residual": True}, {"aux_layers": (1, 7)}, {"shape": {"rope_parameters": LLAMA3_ROPE}},
        {"train_lm_head": False}, {"size": None, "fc_norm": True, "norm_output": True, "dtype": "bfloat16"},
    ],
)  # fmt: skip
def test_our_own_exports_hold(make_export: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    export = make_export(**options)
    export.verify(tmp_path)
    assert ("d2t" in export.tensors) == (options.get("size", 50) is not None)


def test_the_default_contract_names_exactly_the_required_tensors(export: Export) -> None:
    assert sorted([*TABLES["eagle3"].tensors(export.known), "d2t", "t2d"]) == REQUIRED


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_tensor_is_named(export: Export, tmp_path: Path, name: str) -> None:
    del export.tensors[name]
    assert f"missing tensor {name}" in export.fault(tmp_path)


def test_a_missing_fc_norm_is_named(make_export: Any, tmp_path: Path) -> None:
    export = make_export(fc_norm=True)
    del export.tensors["fc_norm.1.weight"]
    assert "missing tensor fc_norm.1.weight" in export.fault(tmp_path)


def test_a_renamed_tensor_is_missing_and_unknown(export: Export, tmp_path: Path) -> None:
    export.tensors["model.norm.weight"] = export.tensors.pop("norm.weight")
    message = export.fault(tmp_path)
    assert "missing tensor norm.weight" in message
    assert "unknown tensor model.norm.weight" in message


@pytest.mark.parametrize("name", ["verifier_norm.weight", "fc.bias", "embed_tokens.weight", "fc_norm.0.weight"])
def test_a_tensor_too_many_is_named(export: Export, tmp_path: Path, name: str) -> None:
    export.tensors[name] = torch.zeros(32)
    assert f"unknown tensor {name}" in export.fault(tmp_path)


def test_a_mapping_beside_a_full_vocabulary_is_refused(make_export: Any, tmp_path: Path) -> None:
    export = make_export(None)
    export.tensors["d2t"] = torch.zeros(258, dtype=torch.int64)
    assert "unknown tensor d2t" in export.fault(tmp_path)


@pytest.mark.parametrize("name", NOT_SQUARE)
def test_a_transposed_tensor_is_named_with_both_shapes(export: Export, tmp_path: Path, name: str) -> None:
    rows, columns = export.tensors[name].shape
    assert rows != columns
    export.tensors[name] = export.tensors[name].T.contiguous()
    assert f"{name} has shape [{columns}, {rows}], expected [{rows}, {columns}]" in export.fault(tmp_path)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fc.weight", torch.float16), ("norm.weight", torch.bfloat16), ("d2t", torch.int32), ("t2d", torch.uint8)],
)
def test_a_wrong_dtype_is_named(export: Export, tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    export.tensors[name] = export.tensors[name].to(dtype)
    assert f"{name} is {dtype}, expected" in export.fault(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_named(export: Export, tmp_path: Path, value: float) -> None:
    export.tensors["fc.weight"][3, 5] = value
    assert "fc.weight holds values that are not finite" in export.fault(tmp_path)


def test_zero_offsets_are_refused(export: Export, tmp_path: Path) -> None:
    export.tensors["d2t"].zero_()
    assert "t2d does not mark the ids that d2t maps to" in export.fault(tmp_path)


def test_absolute_ids_in_d2t_are_refused(export: Export, tmp_path: Path) -> None:
    export.tensors["d2t"] += torch.arange(50)
    assert "d2t, read as offsets, must lie in 0..257" in export.fault(tmp_path)


def test_absolute_ids_that_stay_in_the_vocabulary_are_refused(make_export: Any, tmp_path: Path) -> None:
    export = make_export(4)
    export.tensors["t2d"][:] = False
    export.tensors["t2d"][[10, 20, 30, 40]] = True
    export.tensors["d2t"] = torch.tensor([10, 19, 28, 37])
    export.verify(tmp_path)  # these offsets are right
    export.tensors["d2t"] = torch.tensor([10, 20, 30, 40])
    assert "t2d does not mark the ids that d2t maps to" in export.fault(tmp_path)


def test_offsets_out_of_the_vocabulary_are_refused(export: Export, tmp_path: Path) -> None:
    export.tensors["d2t"][-1] = 258 - 49  # draft id 49 -> 258
    assert "must lie in 0..257" in export.fault(tmp_path)
    export.tensors["d2t"][0] = -1
    assert "must lie in 0..257" in export.fault(tmp_path)


def test_a_target_id_reached_twice_is_refused(export: Export, tmp_path: Path) -> None:
    export.tensors["d2t"][7] = export.tensors["d2t"][6] - 1
    assert "does not ascend strictly" in export.fault(tmp_path)


@pytest.mark.parametrize("nested", [[2, 4, 5], [3, 5, 6], [1, 3], [0, 2, 3]])
def test_nested_layer_ids_must_be_one_less(export: Export, tmp_path: Path, nested: list[int]) -> None:
    export.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = nested
    wanted = f"eagle_config.eagle_aux_hidden_state_layer_ids is {nested}, expected [1, 3, 4]"
    assert wanted in export.fault(tmp_path)


@pytest.mark.parametrize("top", [[1, 3, 4], [3, 5, 6], [4, 2, 5], [2, 2, 5], [0, 4, 5], [2, 4, 8]])
def test_top_layer_ids_must_be_those_of_training(export: Export, tmp_path: Path, top: list[int]) -> None:
    export.config["eagle_aux_hidden_state_layer_ids"] = top
    export.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [layer - 1 for layer in top]
    assert f"eagle_aux_hidden_state_layer_ids is {top}, expected [2, 4, 5]" in export.fault(tmp_path)


def test_the_number_of_layer_ids_must_be_stated(export: Export, tmp_path: Path) -> None:
    export.config["num_aux_hidden_states"] = 2
    assert "num_aux_hidden_states is 2, expected 3" in export.fault(tmp_path)


@pytest.mark.parametrize(
    "key",
    [
        "rope_theta", "rope_parameters", "rope_scaling", "vocab_size", "draft_vocab_size", "hidden_size",
        "target_hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
        "tie_word_embeddings", "fc_norm", "num_aux_hidden_states", "eagle_aux_hidden_state_layer_ids", "dtype",
        "torch_dtype", "architectures", "model_type", "hidden_act", "rms_norm_eps", "max_position_embeddings",
        "norm_output", "norm_before_residual", "norm_before_fc", "num_hidden_layers", "attention_bias", "mlp_bias",
    ],
)  # fmt: skip
def test_a_missing_config_key_is_named(export: Export, tmp_path: Path, key: str) -> None:
    del export.config[key]
    assert f"config lacks {key}, expected" in export.fault(tmp_path)


def test_a_missing_section_is_named(export: Export, tmp_path: Path) -> None:
    del export.config["eagle_config"]
    assert "config lacks eagle_config.eagle_aux_hidden_state_layer_ids" in export.fault(tmp_path)


def test_lost_rope_scaling_is_refused(make_export: Any, tmp_path: Path) -> None:
    export = make_export(shape={"rope_parameters": LLAMA3_ROPE})
    export.config |= {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    assert "rope" in export.fault(tmp_path)


def test_a_reset_rope_base_is_refused(make_export: Any, tmp_path: Path) -> None:
    export = make_export(shape={"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}})
    export.verify(tmp_path)
    export.config["rope_theta"] = 10000.0
    assert "rope_theta is 10000.0, expected 500000.0" in export.fault(tmp_path)
    export.config["rope_theta"], export.config["rope_parameters"]["rope_theta"] = 500000.0, 10000.0
    assert "rope_parameters is" in export.fault(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("vocab_size", 50, "vocab_size is 50, expected 258"),
        ("target_hidden_size", 64, "target_hidden_size is 64, expected 32"),
        ("tie_word_embeddings", True, "tie_word_embeddings is True, expected False"),
        ("torch_dtype", "bfloat16", "torch_dtype is bfloat16, expected float32"),
        ("draft_vocab_size", 258, "draft_vocab_size is 258, expected 50"),
        ("head_dim", 16, "head_dim is 16, expected 8"),
        ("num_hidden_layers", True, "num_hidden_layers is True, expected 1"),
    ],
)
def test_a_wrong_config_value_is_named(export: Export, tmp_path: Path, key: str, value: Any, message: str) -> None:
    export.config[key] = value
    assert message in export.fault(tmp_path)


def test_damaged_files_are_named(export: Export, tmp_path: Path) -> None:
    weights = export.write(tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"model\.safetensors is truncated"):
        FORMATS["eagle3"].faults(tmp_path, export.known)
    weights.unlink()
    with pytest.raises(InputError, match=r"model\.safetensors does not exist"):
        FORMATS["eagle3"].faults(tmp_path, export.known)
    (tmp_path / "config.json").write_text('{"architectures": [')
    with pytest.raises(InputError, match=r"config\.json is no valid JSON"):
        FORMATS["eagle3"].faults(tmp_path, export.known)
