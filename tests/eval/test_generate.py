"""The decoder: greedy equality with transformers in float64, round accounting by hand, and the state of the caches.

The heads are trained on the targets' own answers for a moment, so that drafts are often right and often wrong.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from data.batch import TargetFeatures, Wants
from data.encode import Document
from data.packing import answer_weights, collate
from eval.generate import Generation, Round, plain_generate, speculative_generate
from eval.sampling import SamplingConfig
from train.drafters.base import Draft

GREEDY = SamplingConfig(temperature=0.0, top_k=None, top_p=1.0)
SAMPLED = SamplingConfig(temperature=1.0, top_k=None, top_p=1.0)
VOCAB = 40
PROMPTS = [[3, 17], [5, 9, 30, 2, 2, 11, 7], [(7 * i * i + 3) % VOCAB for i in range(33)]]
ANSWER_TOKENS = 40
FAMILIES = ["llama", "qwen3", "qwen3_moe"]


def transformers_answer(target: Any, prompt: list[int], max_tokens: int, eos: list[int] | None = None) -> list[int]:
    """Greedy decoding by transformers' own generate()."""
    ids = torch.tensor([prompt])
    output = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, eos_token_id=eos,
        pad_token_id=0,
    )  # fmt: skip
    return list(output[0, len(prompt) :].tolist())


def train(drafter: Any, target: Any, answers: list[list[int]], steps: int = 100) -> Any:
    packs = [
        [Document(prompt + answer, [False] * len(prompt) + [True] * len(answer), "test")]
        for prompt, answer in zip(PROMPTS, answers, strict=True)
    ]
    batch = collate(packs, len(PROMPTS[-1]) + ANSWER_TOKENS, answer_weights(packs, "token"))
    features = target.capture(batch, drafter.wants)
    optimizer = torch.optim.Adam((p for p in drafter.parameters() if p.requires_grad), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        drafter.loss(batch, features).loss.backward()
        optimizer.step()
    return drafter.requires_grad_(False).eval().to(torch.float64)


@dataclass(frozen=True)
class World:
    target: Any
    """float64; its only end-of-turn token, 257, lies outside the vocabulary until a test names another."""
    drafters: dict[int | None, Any]
    """By draft vocabulary size; None is the whole vocabulary."""
    answers: list[list[int]]
    """Of transformers, to PROMPTS."""


@pytest.fixture(scope="module")
def worlds(tiny_target: Callable[..., Any], tiny_drafter: Callable[..., Any]) -> Callable[[str], World]:
    made: dict[str, World] = {}

    def world(family: str) -> World:
        if family not in made:
            shape = {"vocab_size": VOCAB, "num_hidden_layers": 4}
            target = tiny_target(family, torch.float64, **shape)
            answers = [transformers_answer(target, prompt, ANSWER_TOKENS) for prompt in PROMPTS]
            teacher = tiny_target(family, torch.float32, **shape)
            drafters = {
                size: train(tiny_drafter(teacher, size, aux_layers=(1, 2, 3)), teacher, answers) for size in (None, 36)
            }
            made[family] = World(target, drafters, answers)
        return made[family]

    return world


def acceptance_length(runs: list[Generation]) -> float:
    rounds = [entry for run in runs for entry in run.rounds]
    return 1 + sum(entry.num_accepted for entry in rounds) / len(rounds)


@pytest.mark.parametrize("size", [None, 36])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_that_of_transformers(worlds: Any, family: str, size: int | None) -> None:
    world = worlds(family)
    for num_drafts in range(1, 9):
        runs = [
            speculative_generate(world.target, world.drafters[size], prompt, ANSWER_TOKENS, num_drafts, GREEDY)
            for prompt in PROMPTS
        ]
        assert [run.tokens for run in runs] == world.answers
        for run in runs:
            assert sum(entry.num_emitted for entry in run.rounds) + 1 == len(run.tokens) == ANSWER_TOKENS
            assert all(0 <= entry.num_accepted <= num_drafts for entry in run.rounds)
            assert all(entry.num_emitted == entry.num_accepted + 1 for entry in run.rounds[:-1])
        assert acceptance_length(runs) > 1.3  # drafts were kept
        assert acceptance_length(runs) < num_drafts + 1  # and rejected


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_of_an_untrained_drafter_is_the_same(worlds: Any, tiny_drafter: Any, family: str) -> None:
    world = worlds(family)
    drafter = tiny_drafter(world.target, 20, aux_layers=(1, 3), fc_norm=True, norm_output=True)
    for prompt, answer in zip(PROMPTS, world.answers, strict=True):
        assert speculative_generate(world.target, drafter, prompt, 20, 5, GREEDY).tokens == answer[:20]


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_output_is_that_of_transformers(worlds: Any, family: str) -> None:
    world = worlds(family)
    for prompt, answer in zip(PROMPTS, world.answers, strict=True):
        run = plain_generate(world.target, prompt, ANSWER_TOKENS, GREEDY, None)
        assert run.tokens == answer
        assert run.rounds == []


@pytest.mark.parametrize("family", FAMILIES)
def test_output_ends_at_end_of_turn_and_limit_like_transformers(
    worlds: Any, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = worlds(family)
    ended_in_accepted_run = {"end of turn": 0, "limit": 0}
    for prompt, answer in zip(PROMPTS, world.answers, strict=True):
        first_seen = sorted({token: answer.index(token) for token in answer}.items(), key=lambda item: item[1])
        for eos, position in first_seen[1:9]:  # not the first token: then there is no round
            ends = [eos, first_seen[-1][0]]
            monkeypatch.setattr(world.target.model.generation_config, "eos_token_id", ends)
            wanted = transformers_answer(world.target, prompt, ANSWER_TOKENS, ends)
            assert plain_generate(world.target, prompt, ANSWER_TOKENS, GREEDY, None).tokens == wanted
            assert wanted == answer[: position + 1]
            for limit, cause in ((ANSWER_TOKENS, "end of turn"), (position, "limit")):
                run = speculative_generate(world.target, world.drafters[None], prompt, limit, 4, GREEDY)
                assert run.tokens == wanted[:limit]
                assert sum(entry.num_emitted for entry in run.rounds) + 1 == len(run.tokens)
                ended_in_accepted_run[cause] += bool(run.rounds) and (
                    run.rounds[-1].num_accepted == run.rounds[-1].num_emitted
                )
    assert all(ended_in_accepted_run.values()), ended_in_accepted_run


@pytest.mark.parametrize("family", FAMILIES)
def test_decoder_sees_what_a_fresh_forward_pass_gives(
    worlds: Any, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = worlds(family)
    prompt = PROMPTS[1]
    seen_logits: list[Tensor] = []
    seen_features: list[Tensor] = []
    seen_ids: list[int] = []
    logits_of, drafter = world.target.logits, world.drafters[None]
    observe = drafter.observe

    def record_logits(states: Tensor) -> Tensor:
        seen_logits.append(logits_of(states))
        return seen_logits[-1]

    def record_rows(state: Any, features: TargetFeatures, next_ids: Tensor) -> None:
        seen_features.append(features.aux_hidden_states[0])
        seen_ids.extend(next_ids[0].tolist())
        observe(state, features, next_ids)

    monkeypatch.setattr(world.target, "logits", record_logits)
    monkeypatch.setattr(drafter, "observe", record_rows)
    run = speculative_generate(world.target, drafter, prompt, ANSWER_TOKENS, 3, GREEDY)
    rejected = [entry for entry in run.rounds if entry.num_accepted < 3]
    assert len(rejected) > 3
    assert len(rejected) < len(run.rounds)  # rollbacks, and rounds without

    text = torch.tensor([prompt + run.tokens])
    with torch.no_grad():
        output = world.target.model(input_ids=text, use_cache=False, output_hidden_states=True)
    row = len(prompt) - 1  # of the fresh pass, the row that chose the first token
    assert (seen_logits[0][0] - output.logits[0, row]).abs().max() < 1e-10
    for entry, rows in zip(run.rounds, seen_logits[1:], strict=True):
        kept = entry.num_emitted  # rows that decided emitted tokens
        assert (rows[:kept] - output.logits[0, row + 1 : row + 1 + kept]).abs().max() < 1e-10
        row += entry.num_emitted
    fresh = torch.cat([output.hidden_states[i][0] for i in drafter.wants.aux_layers], dim=-1)
    known = text.shape[1] - 1  # the drafter took in every token but the last, each with its successor
    assert seen_ids[:known] == text[0, 1:].tolist()
    assert (torch.cat(seen_features)[:known] - fresh[:known]).abs().max() < 1e-10


class CountingTarget:
    """Greedy text 101 102 103 ... after any prompt, by the number of tokens in the cache; its margins shrink by 1."""

    device = torch.device("cpu")
    prompt = (7, 7, 7)

    def __init__(self, *eos: int) -> None:
        self.eos_token_ids = frozenset(eos)

    def new_cache(self) -> list[int]:
        class Cache(list[int]):
            def crop(self, count: int) -> None:
                del self[count:]

        return Cache()

    def step(self, ids: Tensor, cache: list[int], wants: Wants) -> tuple[Tensor, TargetFeatures]:
        rows = []
        for token in ids[0].tolist():
            cache.append(token)
            text_index = len(cache) - len(self.prompt)
            rows.append(torch.nn.functional.one_hot(torch.tensor(101 + text_index), 200) * (50.0 - text_index))
        return torch.stack(rows)[None], TargetFeatures(ids[..., None], None)

    def logits(self, states: Tensor) -> Tensor:
        return states


class ScriptedDrafter:
    """Drafts the target's text, but for chosen tokens."""

    wants = Wants(aux_layers=(), last_hidden_state=False)

    def __init__(self, *wrong: int) -> None:
        self.wrong = wrong

    def start(self, max_tokens: int) -> list[int]:
        return []

    def observe(self, state: list[int], features: TargetFeatures, next_ids: Tensor) -> None:
        assert features.aux_hidden_states.shape[1] == next_ids.shape[1]
        state += next_ids[0].tolist()

    def propose(self, state: list[int], num_draft_tokens: int, warp: Any, generator: Any) -> Draft:
        assert warp is None  # greedy
        drafts = [state[-1] + 1 + k for k in range(num_draft_tokens)]
        return Draft(torch.tensor([[9 if token in self.wrong else token for token in drafts]]), None)


@pytest.mark.parametrize(
    ("wrong", "eos", "max_tokens", "last", "rounds"),
    [  # K = 4; rounds as (accepted, emitted). The first token, 101, comes from the prompt's pass.
        ((), (), 11, 111, [(4, 5), (4, 5)]),
        ((), (), 14, 114, [(4, 5), (4, 5), (3, 3)]),  # the limit cuts an accepted run
        ((), (), 15, 115, [(4, 5), (4, 5), (4, 4)]),  # the limit cuts the bonus
        ((104,), (), 10, 110, [(2, 3), (4, 5), (1, 1)]),  # 102 103 kept, 104 corrected
        ((102, 103), (), 6, 106, [(0, 1), (0, 1), (3, 3)]),
        ((), (108,), 50, 108, [(4, 5), (2, 2)]),  # 107 108 kept, 109 110 beyond the end do not count
        ((), (110,), 50, 110, [(4, 5), (4, 4)]),  # the last draft ends the turn: no bonus
        ((), (111,), 50, 111, [(4, 5), (4, 5)]),  # the bonus ends it
        ((108,), (108,), 50, 108, [(4, 5), (1, 2)]),  # the correction ends it
        ((), (108,), 7, 107, [(4, 5), (1, 1)]),  # the limit comes first
        ((), (101,), 50, 101, []),
        ((), (), 1, 101, []),
    ],
)
def test_rounds_are_counted_as_worked_out_by_hand(
    wrong: tuple[int, ...], eos: tuple[int, ...], max_tokens: int, last: int, rounds: list[tuple[int, int]]
) -> None:
    target: Any = CountingTarget(*eos)
    drafter: Any = ScriptedDrafter(*wrong)
    run = speculative_generate(target, drafter, list(target.prompt), max_tokens, 4, GREEDY)
    assert run.tokens == list(range(101, last + 1))
    assert [(entry.num_accepted, entry.num_emitted) for entry in run.rounds] == rounds


def test_target_gap_is_the_smallest_margin_among_the_rows_that_decided() -> None:
    target: Any = CountingTarget()
    drafter: Any = ScriptedDrafter(105)
    run = speculative_generate(target, drafter, list(target.prompt), 10, 4, GREEDY)
    # Token 101 + i has margin 50 - i. Round 1 decides 102..105 (correction), round 2 decides 106..110 (bonus).
    assert run.rounds == [Round(3, 4, 46.0), Round(4, 5, 41.0)]


def test_sampling_repeats_with_the_seed_and_only_then(worlds: Any) -> None:
    world = worlds("llama")
    runs = [
        speculative_generate(
            world.target, world.drafters[36], PROMPTS[0], 20, 3, SAMPLED, torch.Generator().manual_seed(seed)
        ).tokens
        for seed in (1, 1, 2, 3)
    ]
    assert runs[0] == runs[1]
    assert len({tuple(run) for run in runs}) == 3
