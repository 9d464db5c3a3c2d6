"""The step's bench on a GPU, on the shapes of Qwen3-8B with random weights: `make bench-gpu` takes some minutes."""

import pytest
import torch

from tests.bench.training import options, run_ours

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize(("tokens", "steps"), [(4096, 3), (4096, 7), (16384, 7)])
def test_step_on_the_shapes_of_qwen3_8b(tokens, steps):
    found = run_ours(*options(tokens, steps, 32000, "bfloat16", 5), "--document=2048", model="qwen3-8b")
    print(
        f"\nT={tokens} S={steps}: {tokens / found['seconds']:.0f} tokens/s, MFU {found['mfu']:.2f}, "
        f"{found['peak_mib'] / 1024:.1f} GiB"
    )
    assert 0 < found["mfu"] < 1
