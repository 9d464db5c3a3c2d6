"""The native format of an EAGLE-3 head: names, shapes, offsets and config.json, worked out by hand."""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from serve_export.source import Source
from serve_export.writers.eagle3 import config, tensors
from tests.serve_export.exports import LLAMA3_ROPE
from train.drafters.base import Servable

# The tiny target: D = 32, 4 heads and 2 key/value heads of 8, feed-forward 48, V = 258, 8 layers, 3 auxiliary states.
PORTABLE_SHAPES = {
    "fc.weight": (32, 96),
    "midlayer.input_layernorm.weight": (32,),
    "midlayer.hidden_norm.weight": (32,),
    "midlayer.self_attn.q_proj.weight": (32, 64),
    "midlayer.self_attn.k_proj.weight": (16, 64),
    "midlayer.self_attn.v_proj.weight": (16, 64),
    "midlayer.self_attn.o_proj.weight": (32, 32),
    "midlayer.post_attention_layernorm.weight": (32,),
    "midlayer.mlp.gate_proj.weight": (48, 32),
    "midlayer.mlp.up_proj.weight": (48, 32),
    "midlayer.mlp.down_proj.weight": (32, 48),
    "norm.weight": (32,),
    "lm_head.weight": (50, 32),
}
ALWAYS_WRITTEN = {  # serving.md: rules 9 and 11 of section 1, and section 4.2
    "architectures", "model_type", "vocab_size", "draft_vocab_size", "hidden_size", "target_hidden_size",
    "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "rms_norm_eps", "max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "tie_word_embeddings",
    "attention_bias", "num_aux_hidden_states", "eagle_aux_hidden_state_layer_ids", "eagle_config",
    "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "torch_dtype", "dtype",
}  # fmt: skip


def by_hand(ids: list[int], dtype: Any = "float32") -> Source:
    head = torch.arange(2.0 * len(ids)).reshape(len(ids), 2)
    servable = Servable("eagle3", {"lm_head.weight": head, "draft_to_target_ids": torch.tensor(ids)}, {})
    target: Any = SimpleNamespace(hf_config=LlamaConfig(vocab_size=6))
    return Source(servable, target, dtype, 3)


@pytest.fixture(scope="module")
def make_source(tiny_target: Callable[..., Any], tiny_drafter: Callable[..., Any]) -> Callable[..., Any]:
    """make_source(draft_vocab_size, target overrides, family, dtype, **drafter overrides)."""

    def make(
        size: int | None = 50,
        shape: dict[str, Any] | None = None,
        family: str = "llama",
        dtype: Any = "float32",
        **overrides: Any,
    ) -> Source:
        target = tiny_target(family, **(shape or {}))
        return Source(tiny_drafter(target, size, **overrides).to_serving(), target, dtype, 3)

    return make


def test_d2t_holds_offsets_and_t2d_marks_the_ids() -> None:
    out = tensors(by_hand([1, 2, 5]))
    assert out["d2t"].tolist() == [1, 1, 3]  # 0 + 1, 1 + 1, 2 + 3
    assert out["t2d"].tolist() == [False, True, True, False, False, True]
    assert (out["d2t"].dtype, out["t2d"].dtype) == (torch.int64, torch.bool)


def test_first_ids_have_offset_zero() -> None:
    out = tensors(by_hand([0, 1, 2]))
    assert out["d2t"].tolist() == [0, 0, 0]
    assert out["t2d"].tolist() == [True, True, True, False, False, False]


def test_a_full_draft_vocabulary_has_no_mapping() -> None:
    assert tensors(by_hand([0, 1, 2, 3, 4, 5])).keys() == {"lm_head.weight"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_floats_are_cast_and_own_their_memory(dtype: str) -> None:
    source = by_hand([1, 2, 5], dtype)
    out = tensors(source)["lm_head.weight"]
    assert out.dtype == getattr(torch, dtype)
    assert out.tolist() == [[0, 1], [2, 3], [4, 5]]
    source.servable.tensors["lm_head.weight"].zero_()
    assert out.tolist() == [[0, 1], [2, 3], [4, 5]]


def test_a_head_has_exactly_the_portable_tensors(make_source: Any) -> None:
    source = make_source()
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors(source).items()}
    assert shapes == PORTABLE_SHAPES | {"d2t": (50,), "t2d": (258,)}


def test_fc_norm_adds_one_norm_per_auxiliary_state(make_source: Any) -> None:
    source = make_source(fc_norm=True, aux_layers=(1, 7))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors(source).items()}
    norms = {"fc_norm.0.weight": (32,), "fc_norm.1.weight": (32,)}
    assert shapes == PORTABLE_SHAPES | norms | {"fc.weight": (32, 64), "d2t": (50,), "t2d": (258,)}


def test_a_frozen_lm_head_is_exported_too(make_source: Any) -> None:
    source = make_source(train_lm_head=False)
    assert "lm_head.weight" in tensors(source)


def test_rows_of_the_lm_head_belong_to_the_mapped_ids(make_source: Any, tiny_drafter: Any) -> None:
    target = make_source().target
    drafter = tiny_drafter(target, 50)
    with torch.no_grad():
        drafter.lm_head.weight.copy_(target.lm_head[drafter.draft_to_target_ids])
    out = tensors(Source(drafter.to_serving(), target, "float32", 3))
    for draft_id in (0, 17, 49):
        target_id = draft_id + int(out["d2t"][draft_id])
        assert torch.equal(out["lm_head.weight"][draft_id], target.lm_head[target_id])


def test_config_of_the_default_head(make_source: Any) -> None:
    source = make_source(dtype="bfloat16")
    rope = {"rope_type": "default", "rope_theta": 10000.0}  # transformers' default for llama
    assert config(source) == {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": 258, "draft_vocab_size": 50,
        "hidden_size": 32, "target_hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512, "rope_theta": 10000.0, "rope_scaling": None, "rope_parameters": rope,
        "attention_bias": False, "mlp_bias": False, "bias": False, "tie_word_embeddings": False,
        "norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False,
        "num_aux_hidden_states": 3, "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
        "bos_token_id": None, "eos_token_id": 257, "torch_dtype": "bfloat16", "dtype": "bfloat16",
    }  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_config_writes_every_key_that_some_engine_needs(make_source: Any, family: str) -> None:
    source = make_source(family=family)
    written = config(source)
    assert written.keys() >= ALWAYS_WRITTEN
    assert json.loads(json.dumps(written)) == written
    assert written["intermediate_size"] == 48  # of the head's dense layer, also beside experts of 24


@pytest.mark.parametrize(("layers", "nested"), [((2, 4, 5), [1, 3, 4]), ((1, 7), [0, 6]), ((3,), [2])])
def test_layer_ids_are_written_in_both_conventions(make_source: Any, layers: Any, nested: list[int]) -> None:
    source = make_source(aux_layers=layers)
    written = config(source)
    assert written["eagle_aux_hidden_state_layer_ids"] == list(layers)
    assert written["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == nested
    assert written["num_aux_hidden_states"] == len(layers)


def test_a_full_vocabulary_is_stated_as_such(make_source: Any) -> None:
    source = make_source(None)
    written = config(source)
    assert (written["vocab_size"], written["draft_vocab_size"]) == (258, 258)


@pytest.mark.parametrize("flag", ["fc_norm", "norm_output", "norm_before_residual"])
def test_each_flag_is_stated_alone(make_source: Any, flag: str) -> None:
    source = make_source(**{flag: True})
    written = config(source)
    flags = ("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc")
    assert {key: written[key] for key in flags} == {key: key == flag for key in flags}


def test_rope_scaling_is_written_in_old_and_new_keys(make_source: Any) -> None:
    source = make_source(shape={"rope_parameters": LLAMA3_ROPE})
    written = config(source)
    assert written["rope_theta"] == 10000.0
    assert written["rope_parameters"] == LLAMA3_ROPE
    assert written["rope_scaling"] == {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}


def test_another_rope_base_arrives(make_source: Any) -> None:
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    source = make_source(shape={"rope_parameters": rope})
    written = config(source)
    assert (written["rope_theta"], written["rope_parameters"], written["rope_scaling"]) == (500000.0, rope, None)


def test_several_end_tokens_become_an_ascending_list(make_source: Any) -> None:
    source = make_source(shape={"eos_token_id": [9, 4]})  # 257 is the tokenizer's own
    assert config(source)["eos_token_id"] == [4, 9, 257]


def test_norms_on_queries_and_keys_make_a_qwen3_head(make_source: Any) -> None:
    source = make_source(qk_norm=True)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors(source).items()}
    norms = {f"midlayer.self_attn.{name}_norm.weight": (8,) for name in "qk"}
    assert shapes == PORTABLE_SHAPES | norms | {"d2t": (50,), "t2d": (258,)}
    written = config(source)
    assert (written["architectures"], written["model_type"]) == (["Eagle3Qwen3ForCausalLM"], "qwen3")
