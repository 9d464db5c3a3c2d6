"""Rotary positions, and the shape of the layer beside a target."""

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from train.drafters.layers import Rotary, llama_shape, rotate

H, E = 4, 8


def llama_of(**overrides):
    shape = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": E}
    return llama_shape(CONFIG_MAPPING["llama"](**(shape | overrides)))


def test_rotary_positions_turn_pairs_by_position_times_frequency():
    """Dimensions i and i + E/2 form a complex number, turned by position * theta ** (-2 i / E)."""
    theta = 500.0
    config = llama_of(rope_parameters={"rope_type": "default", "rope_theta": theta})
    positions = torch.tensor([0, 1, 7, 30])
    states = torch.randn(H, 4, E, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    angles = positions[:, None].double() * theta ** (-torch.arange(0, E, 2, dtype=torch.float64) / E)
    turned = torch.complex(states[..., : E // 2], states[..., E // 2 :]) * torch.polar(torch.ones_like(angles), angles)
    expected = torch.cat([turned.real, turned.imag], dim=-1)
    # float32 angles up to 30 rad: 30 * 2 ** -24 = 2e-6
    torch.testing.assert_close(rotate(states, Rotary(config).table(positions)), expected, rtol=0, atol=1e-5)


def test_drafter_in_bfloat16_keeps_exact_frequencies(tiny_target, tiny_drafter):
    drafter = tiny_drafter(tiny_target())
    positions = torch.tensor([0, 3, 400])
    before = drafter.rotary.table(positions)
    after = drafter.to(torch.bfloat16).rotary.table(positions)
    assert all(torch.equal(a, b) and b.dtype == torch.float32 for a, b in zip(before, after, strict=True))


def test_of_several_kinds_of_positions_full_attention_gives_its_own():
    config = CONFIG_MAPPING["gemma3_text"](num_hidden_layers=6)
    assert {kind: rope["rope_theta"] for kind, rope in config.rope_parameters.items()} == {
        "sliding_attention": 10_000.0, "full_attention": 1_000_000.0,
    }  # fmt: skip
    assert llama_shape(config).rope_parameters["rope_theta"] == 1_000_000.0


def test_other_kinds_of_positions_are_refused():
    config = CONFIG_MAPPING["gemma3_text"](num_hidden_layers=6)
    config.rope_parameters = {"near": {}, "far": {}}
    with pytest.raises(ValueError, match=r"several kinds of rotary positions \(near, far\)"):
        llama_shape(config)


def test_target_without_llamas_parts_gets_the_usual_ones():
    shape = llama_shape(CONFIG_MAPPING["gpt2"](n_embd=32, n_head=4))
    assert (shape.intermediate_size, shape.num_key_value_heads, shape.head_dim) == (128, 4, 8)
    assert shape.rope_parameters["rope_theta"] == 10_000.0


def test_head_dim_defaults_to_an_even_share_of_the_width():
    assert llama_shape(CONFIG_MAPPING["qwen2"](hidden_size=64, num_attention_heads=4)).head_dim == 16
