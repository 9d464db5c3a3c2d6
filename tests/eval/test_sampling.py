"""From logits to the distribution that is sampled: every expected value worked out by hand."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from eval.sampling import SamplingConfig

LOGITS = torch.tensor([[8.0, 1.0, 4.0, 2.0, 1.0]], dtype=torch.float64).log()  # weights 8 1 4 2 1 of 16


def sampling(
    temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0, min_p: float = 0.0, penalty: float = 1.0
) -> SamplingConfig:
    return SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty)


def close(probs: torch.Tensor, wanted: list[float]) -> bool:
    return probs.tolist() == [pytest.approx(wanted, abs=1e-12)]


def test_temperature_one_is_the_softmax() -> None:
    assert close(sampling().probs(LOGITS), [8 / 16, 1 / 16, 4 / 16, 2 / 16, 1 / 16])


def test_temperature_half_squares_the_weights() -> None:
    assert close(sampling(temperature=0.5).probs(LOGITS), [64 / 86, 1 / 86, 16 / 86, 4 / 86, 1 / 86])


def test_temperature_two_takes_the_square_root_of_the_weights() -> None:
    roots = [8**0.5, 1.0, 2.0, 2**0.5, 1.0]
    assert close(sampling(temperature=2.0).probs(LOGITS), [root / sum(roots) for root in roots])


@pytest.mark.parametrize(
    ("top_k", "wanted"),
    [
        (1, [1.0, 0, 0, 0, 0]),
        (2, [8 / 12, 0, 4 / 12, 0, 0]),
        (3, [8 / 14, 0, 4 / 14, 2 / 14, 0]),
        (5, [8 / 16, 1 / 16, 4 / 16, 2 / 16, 1 / 16]),
        (99, [8 / 16, 1 / 16, 4 / 16, 2 / 16, 1 / 16]),
    ],
)
def test_top_k_keeps_the_most_likely_and_renormalises(top_k: int, wanted: list[float]) -> None:
    probs = sampling(top_k=top_k).probs(LOGITS)
    assert close(probs, wanted)
    assert [p == 0 for p in probs[0].tolist()] == [w == 0 for w in wanted]  # exactly 0, not tiny


@pytest.mark.parametrize(
    ("top_p", "wanted"),
    [
        (0.01, [1.0, 0, 0, 0, 0]),  # the most likely token always stays
        (0.49, [1.0, 0, 0, 0, 0]),
        (0.51, [8 / 12, 0, 4 / 12, 0, 0]),
        (0.74, [8 / 12, 0, 4 / 12, 0, 0]),
        (0.76, [8 / 14, 0, 4 / 14, 2 / 14, 0]),
        (0.87, [8 / 14, 0, 4 / 14, 2 / 14, 0]),
        (0.95, [8 / 16, 1 / 16, 4 / 16, 2 / 16, 1 / 16]),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, wanted: list[float]) -> None:
    probs = sampling(top_p=top_p).probs(LOGITS)
    assert close(probs, wanted)
    assert [p == 0 for p in probs[0].tolist()] == [w == 0 for w in wanted]


def test_top_p_that_is_met_exactly_needs_no_further_token() -> None:
    halves = torch.zeros(1, 2, dtype=torch.float64)  # softmax gives exactly .5 .5
    assert sampling(top_p=0.5).probs(halves).tolist() == [[1.0, 0.0]]


def test_top_p_counts_after_temperature() -> None:
    # Squared weights 64 1 16 4 1 of 86: the first two reach 80/86 = .93, the first alone only .744.
    assert close(sampling(temperature=0.5, top_p=0.9).probs(LOGITS), [64 / 80, 0, 16 / 80, 0, 0])


def test_top_p_counts_after_top_k() -> None:
    # Of 8 4 2 (top 3 of 14) the first two reach 12/14 = .857; without top-k .85 would need 14/16.
    assert close(sampling(top_k=3, top_p=0.85).probs(LOGITS), [8 / 12, 0, 4 / 12, 0, 0])


def test_rows_are_processed_one_by_one() -> None:
    rows = torch.stack([LOGITS[0], LOGITS[0].flip(0)])[None]  # (1, 2, 5)
    probs = sampling(top_k=2, top_p=0.6).probs(rows)  # 8/12 = .667 alone reaches .6
    assert probs.tolist() == [[[1.0, 0, 0, 0, 0], [0, 0, 0, 0, 1.0]]]


@pytest.mark.parametrize("settings", [sampling(), sampling(0.7, 20, 0.9), sampling(1.3, None, 0.5), sampling(0.2, 7)])
def test_rows_sum_to_one(settings: SamplingConfig) -> None:
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    probs = settings.probs(logits)
    assert (probs >= 0).all()
    assert probs.sum(-1).tolist() == pytest.approx([1.0] * 4, abs=1e-12)


@pytest.mark.parametrize("settings", [sampling(), sampling(0.7, 3, 0.9)])
def test_float64_stays_and_everything_else_becomes_float32(settings: SamplingConfig) -> None:
    wanted = {torch.float64: torch.float64, torch.float32: torch.float32, torch.bfloat16: torch.float32}
    for given, returned in wanted.items():
        assert settings.probs(LOGITS.to(given)).dtype == returned


def test_bfloat16_logits_are_processed_in_float32() -> None:
    logits = torch.tensor([[1.0, 0.5, -2.0]], dtype=torch.bfloat16)  # exact in bfloat16
    reference = (logits.double() / 0.7).softmax(-1)
    assert (sampling(0.7).probs(logits).double() - reference).abs().max() < 1e-6  # bfloat16 would be off by 1e-3


def test_the_logits_are_left_alone() -> None:
    before = LOGITS.clone()
    sampling(0.7, 2, 0.6).probs(LOGITS)
    assert torch.equal(before, LOGITS)


def test_greedy_has_no_distribution() -> None:
    assert sampling(temperature=0.0).greedy
    assert not sampling(temperature=0.1).greedy
    with pytest.raises(ValueError, match="temperature 0 chooses by argmax"):
        sampling(temperature=0.0).probs(LOGITS)


@pytest.mark.parametrize("wrong", [{"temperature": -0.1}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.1}])
def test_impossible_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        sampling(**wrong)


@pytest.mark.parametrize(
    ("min_p", "wanted"),
    [
        (0.1, [8 / 16, 1 / 16, 4 / 16, 2 / 16, 1 / 16]),  # of the largest, 8: all have at least 0.8
        (0.2, [8 / 14, 0, 4 / 14, 2 / 14, 0]),
        (0.3, [8 / 12, 0, 4 / 12, 0, 0]),
        (1.0, [1.0, 0, 0, 0, 0]),
    ],
)
def test_min_p_keeps_a_share_of_the_most_likely(min_p: float, wanted: list[float]) -> None:
    assert close(sampling(min_p=min_p).probs(LOGITS), wanted)


def test_repetition_penalty_divides_positive_logits_and_multiplies_negative_ones() -> None:
    logits = torch.tensor([[3.0, 3.0, -2.0, -2.0]])
    seen = torch.tensor([[True, False, True, False]])
    assert sampling(penalty=2.0).penalise(logits, seen).tolist() == [[1.5, 3.0, -4.0, -2.0]]
    assert sampling(penalty=2.0).penalises and not sampling().penalises
