"""Attention of training-time test against a dense masked softmax in float64."""

import pytest
import torch

from data import blocked_attention as module
from train.drafters.ttt_attention import ttt_attention

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
@pytest.mark.parametrize("block", [2, module.BLOCK_ROWS])
@pytest.mark.parametrize("querying", list(QUERYING))
def test_values_and_gradients_are_those_of_the_dense_softmax(monkeypatch, querying, block, dtype, num_steps):
    monkeypatch.setattr(module, "BLOCK_ROWS", block)
    rows = torch.tensor(QUERYING[querying])
    asking = torch.isin(rows, torch.tensor(INSIDE))
    arguments = inputs(num_steps, dtype, len(rows))
    reference = [double(part) for part in arguments]
    expected, found = dense(*reference, rows), ttt_attention(*arguments, rows, SPANS)
    assert found.dtype == dtype
    assert_relative(found[:, asking], expected, LIMITS[dtype])
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    found[:, asking].backward(upstream)
    expected.backward(upstream.double())
    for leaf, other in zip(flat(arguments), flat(reference), strict=True):
        assert_relative(leaf.grad, other.grad, LIMITS[dtype])
