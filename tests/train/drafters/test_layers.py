"""Attention of training-time test against a dense masked softmax in float64."""

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from train.drafters.layers import (
    Rotary,
    _plain_ttt_attention,
    llama_shape,
    rotate,
    ttt_attention,
)

H, G, E = 4, 2, 8
ROWS = 17
SPANS = [(0, 5), (5, 6), (8, 15)]  # a document of one row, padding between documents and at the end
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2}
"""Relative. bfloat16: epsilon is 2 ** -7, and the merged parts are rounded one by one."""
INSIDE = [row for start, end in SPANS for row in range(start, end)]
PADDING = [row for row in range(ROWS) if row not in INSIDE]


QUERYING = {"all": list(range(ROWS)), "documents": INSIDE, "some": [1, 2, 4, 5, 9, 14], "none of one": [0, 3, 10]}
"""Rows that ask; in the last case the document of one row has none."""


def inputs(num_steps, dtype, num_queries=ROWS, seed=0):
    """query, keys and values of step 0, own keys, own values: leaves in `dtype`."""
    generator = torch.Generator().manual_seed(seed)

    def draw(heads, rows):
        return torch.randn(heads, rows, E, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    own_keys, own_values = ([draw(G, num_queries) for _ in range(num_steps)] for _ in range(2))
    return draw(H, num_queries), draw(G, ROWS), draw(G, ROWS), own_keys, own_values


def dense(query, keys, values, own_keys, own_values, rows):
    """Softmax over all blocks of rows with the recipe's predicate, as one mask; (H, ...) of the rows in documents."""
    keys, values = torch.cat([keys, *own_keys], dim=1), torch.cat([values, *own_values], dim=1)
    document = torch.full((ROWS,), -1)
    for index, (start, end) in enumerate(SPANS):
        document[start:end] = index
    owner = torch.cat([torch.arange(ROWS), *[rows for _ in own_keys]])  # the row of each key
    shared = torch.arange(keys.shape[1]) < ROWS
    asking = torch.isin(rows, torch.tensor(INSIDE))
    q = rows[asking, None]
    allowed = (shared & (owner <= q)) | (~shared & (owner == q))
    allowed &= document[q] == document[owner]
    out = []
    for head in range(H):
        group = head // (H // G)
        scores = query[head, asking] @ keys[group].T / E**0.5
        out.append(scores.masked_fill(~allowed, float("-inf")).softmax(dim=-1) @ values[group])
    return torch.stack(out)


def plain(query, keys, values, own_keys, own_values, rows):
    repeated = [tensor.repeat_interleave(H // G, dim=0) for tensor in (keys, values, *own_keys, *own_values)]
    return _plain_ttt_attention(query, *repeated[:2], repeated[2:], rows, SPANS)


def fast(query, keys, values, own_keys, own_values, rows):
    return ttt_attention(query, keys, values, own_keys, own_values, rows, SPANS)


def flat(arguments):
    query, keys, values, own_keys, own_values = arguments
    return [query, keys, values, *own_keys, *own_values]


def assert_relative(found, expected, limit):
    assert found.shape == expected.shape
    assert (found.double() - expected).norm() <= limit * expected.norm()


def double(part):
    return [double(tensor) for tensor in part] if isinstance(part, list) else part.detach().double().requires_grad_()


@pytest.mark.parametrize("num_steps", range(4))
@pytest.mark.parametrize("dtype", list(LIMITS))
@pytest.mark.parametrize("attention", [fast, plain])
@pytest.mark.parametrize("querying", list(QUERYING))
def test_values_and_gradients_are_those_of_the_dense_softmax(querying, attention, dtype, num_steps):
    rows = torch.tensor(QUERYING[querying])
    asking = torch.isin(rows, torch.tensor(INSIDE))
    arguments = inputs(num_steps, dtype, len(rows))
    reference = [double(part) for part in arguments]
    expected, found = dense(*reference, rows), attention(*arguments, rows)
    assert found.dtype == dtype
    assert_relative(found[:, asking], expected, LIMITS[dtype])
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    found[:, asking].backward(upstream)
    expected.backward(upstream.double())
    for leaf, other in zip(flat(arguments), flat(reference), strict=True):
        assert_relative(leaf.grad, other.grad, LIMITS[dtype])


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
