"""The round-walk: by hand, and round by round against the decoder that it stands for; what a sampled draft states."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.encode import Document
from data.packing import answer_weights, collate
from eval.generate import plain_generate, speculative_generate
from tests.eval.decoding import decoding
from train.acceptance import Acceptance, round_walk, walk
from train.drafters.base import chain

K = 4
PROMPTS = [[256, *text] for text in (b"Why is the sky blue?", b"Hello", b"a", b"Count to ten: 1, 2")]


@pytest.mark.parametrize(
    ("accepted_if_started", "num_tokens", "rounds"),
    [
        # 7 answer tokens: the round after token 0 keeps 2 and adds one (tokens 1, 2, 3); after token 3 it keeps 1 and
        # adds one (4, 5); after token 5 it keeps 0 and adds token 6, the last.
        ([2, 9, 9, 1, 9, 0], 7, [2, 1, 0]),
        ([0, 0, 0], 4, [0, 0, 0]),
        ([3, 9, 9], 4, [3]),  # the answer ends within the accepted run: nothing is left to add
        ([1, 9, 1], 4, [1, 1]),  # the second round keeps token 3, the last
        ([2, 0, 1, 0, 9], 6, [2, 0, 9]),
        ([], 1, []),  # a one-token answer comes from the prompt's own forward pass
    ],
)
def test_walk_by_hand(accepted_if_started, num_tokens, rounds):
    assert walk(accepted_if_started, num_tokens) == rounds


def test_rates_by_hand():
    acceptance = Acceptance(num_accepted=(2, 0, 1, 3), num_draft_tokens=4)
    assert acceptance.acceptance_length == 2.5  # (3 + 1 + 2 + 4) / 4
    assert acceptance.joint_rates == [3 / 4, 2 / 4, 1 / 4, 0]
    assert acceptance.conditional_rates == [3 / 4, 2 / 3, 1 / 2, 0]


def test_rate_that_was_never_tried_is_none():
    assert Acceptance((0, 1), 3).conditional_rates == [1 / 2, 0, None]
    assert Acceptance((), 2).acceptance_length == 1


@given(counts=st.lists(st.integers(0, 5), min_size=1, max_size=50))
def test_acceptance_length_is_one_plus_the_joint_rates(counts):
    acceptance = Acceptance(tuple(counts), 5)
    assert acceptance.acceptance_length == pytest.approx(1 + sum(acceptance.joint_rates), rel=1e-12)


def answered(target, prompts, max_tokens):
    """The target's greedy answers as documents."""
    answers = [run.tokens for run in plain_generate(target, prompts, decoding(chain(K), max_tokens)).answers]
    return [
        Document(prompt + answer, [False] * len(prompt) + [True] * len(answer), "greedy")
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def packed(documents):
    """The first alone in the second pack, the others in the first one."""
    packs = [documents[1:], documents[:1]]
    return collate(packs, sum(map(len, documents)), answer_weights(packs, "token"))


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def trained(request, tiny_target, tiny_drafter):
    """A float64 target, and a drafter that has learned some of its greedy text (not that of the third prompt)."""
    target = tiny_target(request.param, torch.float64)
    drafter = tiny_drafter(target, draft_vocab_size=240, norm_output=request.param == "qwen3")
    batch = packed(answered(target, [*PROMPTS[:2], PROMPTS[3]], 30))
    features = target.capture(batch, drafter.wants)
    optimizer = torch.optim.Adam([p for p in drafter.parameters() if p.requires_grad], lr=0.01)
    for _ in range(120):
        optimizer.zero_grad()
        drafter.loss(batch, features).loss.backward()
        optimizer.step()
    return target, drafter.eval()


def walked(target, drafter, documents):
    """num_accepted of every round of the round-walk, in the order of `documents`."""
    batch = packed(documents)
    *others, first = round_walk(drafter, batch, target.capture(batch, drafter.wants), K)
    return [first, *others]


def decoded(target, drafter, documents, max_tokens):
    """The same of the decoder, having checked that it writes the documents' answers."""
    rounds = []
    for document in documents:
        prompt = document.input_ids[: document.loss_mask.index(True)]
        (generation,) = speculative_generate(target, drafter, [prompt], decoding(chain(K), max_tokens)).answers
        assert prompt + generation.tokens == document.input_ids
        rounds.append([turn.num_accepted for turn in generation.rounds])
    return rounds


def test_rounds_are_those_of_the_decoder(trained):
    target, drafter = trained
    documents = answered(target, PROMPTS, 30)
    rounds = walked(target, drafter, documents)
    assert rounds == decoded(target, drafter, documents, 30)
    flat = tuple(count for answer in rounds for count in answer)
    assert Acceptance(flat, K).acceptance_length > 1.5 and set(flat) >= {0, 1, 2, 3}  # or nothing was tested


def accepted_runs(target, drafter):
    """(prompt, answer, earlier rounds, first index, length) of each run of two or more accepted drafts."""
    for document in answered(target, PROMPTS, 30):
        prompt_length, position = document.loss_mask.index(True), 0
        (rounds,) = walked(target, drafter, [document])
        for number, count in enumerate(rounds):
            if count >= 2:
                prompt, answer = document.input_ids[:prompt_length], document.input_ids[prompt_length:]
                yield prompt, answer, rounds[:number], position + 1, count
            position += count + 1


def test_limit_inside_an_accepted_run_cuts_both_alike(trained):
    target, drafter = trained
    cuts = 0
    for prompt, answer, earlier, first, length in accepted_runs(target, drafter):
        for kept in range(1, length):
            max_tokens = first + kept
            documents = answered(target, [prompt], max_tokens)
            assert documents[0].input_ids == prompt + answer[:max_tokens]
            assert walked(target, drafter, documents) == [[*earlier, kept]]
            assert decoded(target, drafter, documents, max_tokens) == [[*earlier, kept]]
            cuts += 1
    assert cuts >= 3


def test_end_of_turn_inside_an_accepted_run_ends_both_alike(trained, monkeypatch):
    target, drafter = trained
    cuts = 0
    for prompt, answer, earlier, first, length in list(accepted_runs(target, drafter)):
        for kept in range(1, length):
            end = first + kept - 1
            if answer.index(answer[end]) < end:
                continue  # the answer would have ended before
            monkeypatch.setattr(target.model.generation_config, "eos_token_id", answer[end])
            documents = answered(target, [prompt], 30)
            assert documents[0].input_ids == prompt + answer[: end + 1]
            assert walked(target, drafter, documents) == [[*earlier, kept]]
            assert decoded(target, drafter, documents, 30) == [[*earlier, kept]]
            monkeypatch.undo()
            cuts += 1
    assert cuts >= 1


class Scripted:
    """A drafter whose drafts are given, row by row."""

    def __init__(self, drafts):
        self.drafts = torch.tensor(drafts)

    def greedy_drafts(self, batch, features, num_draft_tokens):
        return self.drafts[None, :, :num_draft_tokens]


@pytest.mark.parametrize(
    ("changes", "rounds"),
    [
        # Text: prompt 1 2, answer 10 11 12 13 14 (rows 2..6), then a document 9 8 7 whose answer is 7 alone.
        # Row 1 drafts what follows token 10.
        ({1: [11, 12], 4: [14, 9]}, [2, 1]),  # keeps 11 12, adds 13; row 4 keeps 14, but 9 lies beyond the end
        ({1: [11, 9], 3: [13, 14]}, [1, 2]),  # keeps 11, adds 12; row 3 keeps 13 14, the end
        ({1: [9, 12], 2: [12, 13], 5: [9, 9]}, [0, 2]),  # a hit after a miss does not count
        ({0: [10, 11], 2: [12, 13], 3: [13, 14]}, [0, 2]),  # row 0 and row 3 start no round
        ({}, [0, 0, 0, 0]),
    ],
)
def test_rounds_of_given_drafts_by_hand(changes, rounds):
    drafts = [changes.get(row, [0, 0]) for row in range(10)]
    documents = [
        Document([1, 2, 10, 11, 12, 13, 14], [False] * 2 + [True] * 5, ""),
        Document([9, 8, 7], [False, False, True], ""),
    ]
    assert round_walk(Scripted(drafts), collate([documents], 10, [[0.0, 0.0]]), None, 2) == [rounds, []]


def test_sampled_draft_states_the_distribution_that_it_was_drawn_from(trained):
    target, drafter = trained
    document = answered(target, PROMPTS[:1], 9)[0]
    batch = collate([[document]], len(document), [[0.0]])
    rows = target.capture(batch, drafter.wants).select(torch.arange(len(document) - 1)[None])
    state = drafter.start([document.input_ids], len(document) + 3)
    with pytest.raises(ValueError, match="observe"):
        drafter.propose(state, chain(3), None, None)
    drafter.observe(state, rows, batch.input_ids[:, 1:], torch.tensor([len(document) - 1]))
    seen = []

    def warp(logits):
        seen.append((logits / 5).softmax(-1))
        return seen[-1]

    draft = drafter.propose(state, chain(3), warp, torch.Generator().manual_seed(0))
    assert torch.equal(draft.probs[0][:, drafter.draft_to_target_ids], torch.cat(seen))
    assert (draft.probs > 0).sum(-1).tolist() == [[240] * 3]  # nothing outside the draft vocabulary
    assert (draft.probs.gather(-1, draft.tokens[..., None]) > 0).all()
