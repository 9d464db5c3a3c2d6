"""Prompt lookup: what it drafts, by hand."""

import dataclasses
from typing import Any

import pytest
import torch

from tests.eval.decoding import static_tree
from train.drafters.base import chain
from train.drafters.ngram import NgramConfig, NgramProposer


def ngram_proposer() -> Any:
    nothing: Any = None
    return NgramConfig(name="ngram", draft_vocab_size=None, min_ngram=1, max_ngram=3, occurrence="latest").build(
        nothing, nothing
    )


def drafts(proposer: Any, text: list[int], count: int) -> list[int]:
    """What is drafted after a text that came as prompt and answer."""
    half = len(text) // 2
    state = proposer.start([text[:half]], 99)
    for ids in (text[1:half], text[half:]):
        proposer.observe(state, None, torch.tensor([ids]), torch.tensor([len(ids)]))
    draft = proposer.propose(state, chain(count), None, None)
    return list(draft.tokens[0, : int(draft.num_drafts[0])].tolist())


def test_ngram_drafts_what_followed_by_hand() -> None:
    ngram = ngram_proposer()
    assert drafts(ngram, [1, 2, 3, 4, 9, 2, 3, 5, 8, 2, 3], 3) == [5, 8, 2]  # the latest 2 3, not the first
    first = NgramProposer(dataclasses.replace(ngram.settings, occurrence="earliest"))
    assert drafts(first, [1, 2, 3, 4, 9, 2, 3, 5, 8, 2, 3], 3) == [4, 9, 2]  # as vLLM and transformers
    assert drafts(ngram, [7, 1, 2, 3, 4, 8, 2, 3, 6, 1, 2, 3], 2) == [4, 8]  # a longer match wins over a later one
    assert drafts(ngram, [1, 2, 3], 4) == []


def test_tree_from_a_model_free_proposer_is_refused() -> None:
    proposer = ngram_proposer()
    state = proposer.start([[1]], 9)
    with pytest.raises(ValueError, match=r"drafts chains only.*draft=chain"):
        proposer.propose(state, static_tree(2), None, None)


def test_shortest_match_longer_than_the_longest_is_refused() -> None:
    nothing: Any = None
    with pytest.raises(ValueError, match="min_ngram=3 exceeds max_ngram=2"):
        NgramConfig(name="ngram", draft_vocab_size=None, min_ngram=3, max_ngram=2, occurrence="latest").build(
            nothing, nothing
        )
