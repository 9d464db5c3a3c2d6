"""What Medusa's loss costs in memory."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from data.batch import TargetFeatures
from tests.bench.measure import peak_growth
from tests.bench.step import SHAPES, batch_of, parts_of
from tests.families import settings_of

TOKENS = 2048


def growth_of_five_heads() -> int:
    """Bytes of loss and gradients over what the features take: SmolLM2's shapes, its whole vocabulary, float32."""
    shape = SHAPES["smollm2"]
    head = 0.02 * torch.randn(shape.vocab_size, shape.hidden_size)
    drafter = settings_of("medusa", num_heads=5).build(parts_of(shape, head), torch.arange(shape.vocab_size))
    batch = batch_of(1, TOKENS, TOKENS, 1.0, torch.randint(0, shape.vocab_size, (TOKENS,)))
    features = TargetFeatures(torch.empty(1, TOKENS, 0), torch.randn(1, TOKENS, shape.hidden_size))

    def step() -> None:
        drafter.loss(batch, features).loss.backward()

    return peak_growth(step)


def test_loss_of_five_heads_over_the_whole_vocabulary_fits_a_gibibyte() -> None:
    """The logits of one head alone would take 384 MiB, those of five with their gradients 3.75 GiB."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:  # nobody else's high-water mark
        growth = alone.submit(growth_of_five_heads).result()
    print(f"{growth / 2**20:.0f} MiB")
    assert growth < 2**30
