"""The draft vocabulary: most frequent supervised tokens, counted by hand."""

import pytest
import torch

from conf import InputError
from data.encode import Document
from data.vocab import choose_draft_vocabulary, coverage

# Supervised: 9 three times, 4 twice, 6 twice, 2 once. Unsupervised: 1 five times.
DOCUMENTS = [
    Document([1, 1, 1, 9, 9, 4, 6], [False] * 3 + [True] * 4, "a"),
    Document([1, 1, 6, 4, 2, 9], [False, False, True, True, True, True], "b"),
]


def choose(size, special=(), vocab_size=12):
    return choose_draft_vocabulary(DOCUMENTS, special, size, vocab_size)


@pytest.mark.parametrize(
    ("size", "special", "expected"),
    [
        (1, (), [9]),
        (3, (), [4, 6, 9]),
        (2, (), [4, 9]),  # 4 and 6 tie: the lower id
        (4, (), [2, 4, 6, 9]),
        (6, (), [0, 1, 2, 4, 6, 9]),  # room that the corpus does not fill: the lowest ids; 1 counts for nothing
        (2, (11,), [9, 11]),
        (3, (11, 3), [3, 9, 11]),
        (2, (11, 3), [3, 11]),  # the special tokens alone
        (2, (9, 9), [4, 9]),  # special and frequent: once
        (2, (50,), [4, 9]),  # not in the target's embedding: cannot be drafted
        (12, (11,), list(range(12))),
    ],
)
def test_draft_vocabulary_by_hand(size, special, expected):
    chosen = choose(size, special)
    assert chosen.dtype == torch.int64
    assert chosen.tolist() == expected


@pytest.mark.parametrize(("size", "special"), [(13, ()), (1, (3, 11)), (0, (3,))])
def test_impossible_size_is_refused(size, special):
    with pytest.raises(
        InputError, match=rf"draft vocabulary of {size} tokens: expected between {len(special)} .*and 12"
    ):
        choose(size, special)


@pytest.mark.parametrize(("ids", "share"), [([9], 3 / 8), ([4, 6, 9], 7 / 8), ([1, 3], 0.0), (range(12), 1.0)])
def test_coverage_by_hand(ids, share):
    assert coverage(DOCUMENTS, torch.tensor(list(ids))) == pytest.approx(share, abs=1e-12)
