"""Suffix decoding: what it drafts, by hand."""

from typing import Any

import pytest
import torch

from tests.train.drafters.test_ngram import drafts
from train.drafters.base import chain
from train.drafters.suffix import SuffixConfig


def suffix_proposer(depth: int, factor: float = 2.0, probability: float = 0.1, remember: bool = False) -> Any:
    nothing: Any = None
    return SuffixConfig(
        name="suffix", draft_vocab_size=None, max_tree_depth=depth, max_spec_factor=factor,
        min_token_prob=probability, remember_outputs=remember,
    ).build(nothing, nothing)  # fmt: skip


def test_most_frequent_continuation_while_it_is_likely() -> None:
    text = [3, 4, 6, 3, 5, 0, 3, 4, 7, 1, 3]
    # 3 occurred 4 times (the end included) and 4 followed twice: 1/2. 3 4 occurred twice, 6 followed once: 1/4 in all.
    assert drafts(suffix_proposer(4), text, 4) == [4, 6]
    assert drafts(suffix_proposer(4, probability=0.25), text, 4) == [4, 6]
    assert drafts(suffix_proposer(4, probability=0.3), text, 4) == [4]
    assert drafts(suffix_proposer(4, probability=0.6), text, 4) == []
    assert drafts(suffix_proposer(4, factor=1.0), text, 4) == [4]  # one token of match, one draft
    assert drafts(suffix_proposer(4), [1, 2, 3, 4], 4) == []


def test_drafts_and_their_match_are_no_longer_than_the_tree_is_deep() -> None:
    text = [1, 2, 1, 2, 1, 2, 1, 2, 1, 2]
    assert drafts(suffix_proposer(5, factor=9.0), text, 9) == [1, 2, 1, 2]
    assert drafts(suffix_proposer(3, factor=9.0), text, 9) == [1, 2]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1, 2, 3, 9, 5, 2, 4, 9, 5, 2, 4, 1, 2], 3),  # 1 2: 3 in one of 2; 2: 4 in two of 4; as likely, so the longer
        ([1, 2, 3, 9, 5, 2, 4, 9, 5, 2, 4, 8, 2, 4, 1, 2], 4),  # 2: 4 in three of 5, which is more than 1/2
    ],
)
def test_the_match_that_promises_most_is_taken(text: list[int], expected: int) -> None:
    assert drafts(suffix_proposer(8), text, 1) == [expected]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([7, 1, 7, 2, 7], 1),  # a new token is the last of its equals
        ([7, 1, 7, 2, 7, 2, 7, 1, 7], 1),  # 1 comes last to a count of 2, as first of those with 1: to the front
        ([7, 1, 7, 2, 7, 3, 7, 3, 7, 1, 7], 1),  # the same with another behind it
        ([7, 1, 7, 2, 7, 3, 7, 3, 7, 2, 7], 3),  # 2 was not the first of those with 1: before 1, and behind 3
    ],
)
def test_ties_are_broken_as_the_engines_tree_breaks_them(text: list[int], expected: int) -> None:
    assert drafts(suffix_proposer(2), text, 1) == [expected]


def test_answers_of_others_are_remembered_only_if_told_and_prompts_never() -> None:
    for remember, expected in ((False, [0, 0, 0]), (True, [0, 2, 0])):
        proposer = suffix_proposer(4, remember=remember)
        first = proposer.start([[5, 6]], 99)
        proposer.observe(first, None, torch.tensor([[6, 7, 8, 9]]), torch.tensor([4]))
        second = proposer.start([[1, 6], [1, 7], [1, 9]], 99)
        proposer.observe(second, None, torch.tensor([[6], [7], [9]]), torch.tensor([1, 1, 1]))
        draft = proposer.propose(second, chain(3), None, None)
        assert draft.num_drafts.tolist() == expected
