"""Model-free proposers: what they draft, by hand."""

import dataclasses
from typing import Any

import pytest
import torch

from tests.eval.decoding import static_tree
from train.drafters.base import chain
from train.drafters.ngram import NgramConfig, NgramProposer, SuffixConfig


def ngram_proposer() -> Any:
    nothing: Any = None
    return NgramConfig(name="ngram", draft_vocab_size=None, min_ngram=1, max_ngram=3, occurrence="latest").build(
        nothing, nothing
    )


def test_model_free_proposers_draft_what_followed_by_hand() -> None:
    def drafts(proposer: Any, text: list[int], count: int) -> list[int]:
        state = proposer.start([text], 99)
        proposer.observe(state, None, torch.tensor([text[1:]]), torch.tensor([len(text) - 1]))
        draft = proposer.propose(state, chain(count), None, None)
        return list(draft.tokens[0, : int(draft.num_drafts[0])].tolist())

    ngram = ngram_proposer()
    assert drafts(ngram, [1, 2, 3, 4, 9, 2, 3, 5, 8, 2, 3], 3) == [5, 8, 2]  # the latest 2 3, not the first
    first = NgramProposer(dataclasses.replace(ngram.settings, occurrence="earliest"))
    assert drafts(first, [1, 2, 3, 4, 9, 2, 3, 5, 8, 2, 3], 3) == [4, 9, 2]  # as vLLM and transformers
    assert drafts(ngram, [7, 1, 2, 3, 4, 8, 2, 3, 6, 1, 2, 3], 2) == [4, 8]  # a longer match wins over a later one
    assert drafts(ngram, [1, 2, 3], 4) == []
    suffix = SuffixConfig(
        name="suffix", draft_vocab_size=None, max_depth=4, min_probability=0.6, max_drafts_per_match=2.0,
        remember_outputs=False,
    ).build(None, None)  # type: ignore[arg-type]  # fmt: skip
    # After 3: 4 (twice) and 5 (once), 2/3 >= 0.6; after 3 4: 6 and 7, a half each: stop.
    assert drafts(suffix, [3, 4, 6, 3, 5, 0, 3, 4, 7, 1, 3], 4) == [4]
    assert drafts(suffix, [1, 2, 1, 2, 1, 2], 9) == [1, 2, 1, 2, 1, 2, 1, 2]  # 2 drafts per matched token


def test_suffix_remembers_other_sequences_only_if_told() -> None:
    for remember, expected in ((False, [0, 0]), (True, [2, 0])):
        proposer = SuffixConfig(
            name="suffix", draft_vocab_size=None, max_depth=4, min_probability=0.1, max_drafts_per_match=2.0,
            remember_outputs=remember,
        ).build(None, None)  # type: ignore[arg-type]  # fmt: skip
        first = proposer.start([[5, 6, 7, 8]], 99)
        proposer.observe(first, None, torch.tensor([[6, 7, 8]]), torch.tensor([3]))  # type: ignore[arg-type]
        second = proposer.start([[1, 6], [1, 9]], 99)
        proposer.observe(second, None, torch.tensor([[6], [9]]), torch.tensor([1, 1]))  # type: ignore[arg-type]
        draft = proposer.propose(second, chain(3), None, None)
        assert draft.num_drafts is not None and draft.num_drafts.tolist() == expected


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
