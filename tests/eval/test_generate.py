"""The decoder: greedy equality with transformers in float64, round accounting by hand, and the state of the caches.

The heads are trained on the targets' own answers for a moment, so that drafts are often right and often wrong.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from data.batch import TargetFeatures
from data.encode import Document
from data.packing import answer_weights, collate
from eval.generate import plain_generate, speculative_generate
from eval.generation import Generation
from eval.sampling import SamplingConfig
from tests.eval.decoding import SAMPLED, decoding, dynamic_tree, static_tree
from train.drafters.base import DraftPlan, chain
from train.drafters.ngram import NgramConfig
from train.drafters.suffix import SuffixConfig

VOCAB = 40
PROMPTS = [[3, 17], [5, 9, 30, 2, 2, 11, 7], [(7 * i * i + 3) % VOCAB for i in range(33)]]
ANSWER_TOKENS = 40
FAMILIES = ["llama", "qwen3", "qwen3_moe", "gemma3_text", "gpt2"]
MODEL_FREE = {
    "ngram": NgramConfig(name="ngram", draft_vocab_size=None, min_ngram=1, max_ngram=3, occurrence="latest"),
    "suffix": SuffixConfig(
        name="suffix", draft_vocab_size=None, max_tree_depth=6, max_spec_factor=4.0, min_token_prob=0.1,
        remember_outputs=True,
    ),
}  # fmt: skip


def transformers_answer(target: Any, prompt: list[int], max_tokens: int, eos: list[int] | None = None) -> list[int]:
    """Greedy decoding by transformers' own generate()."""
    ids = torch.tensor([prompt])
    output = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, eos_token_id=eos,
        pad_token_id=0,
    )  # fmt: skip
    return list(output[0, len(prompt) :].tolist())


def train(
    drafter: Any, target: Any, answers: list[list[int]], steps: int = 100, prompts: list[list[int]] | None = None
) -> Any:
    packs = [
        [Document(prompt + answer, [False] * len(prompt) + [True] * len(answer), "test")]
        for prompt, answer in zip(prompts or PROMPTS, answers, strict=True)
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


def proposers(world: World) -> dict[str, Any]:
    model_free = {
        name: settings.build(world.target.parts, torch.arange(VOCAB)) for name, settings in MODEL_FREE.items()
    }
    return {"head": world.drafters[36], "head of the whole vocabulary": world.drafters[None], **model_free}


PLANS = {
    **{f"chain {k}": chain(k) for k in range(1, 9)},
    "static 3 2 1": static_tree(3, 2, 1),
    "static 1 3": static_tree(1, 3),
    "dynamic 4": dynamic_tree(4, 3, 7),
    "dynamic 8": dynamic_tree(8, 2, 12),
}


QUICK = ["chain 1", "chain 3", "chain 4", "chain 8", "static 3 2 1", "dynamic 4"]


@pytest.mark.parametrize("shapes", [QUICK, pytest.param(list(PLANS), marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_that_of_transformers(worlds: Any, family: str, batch: int, shapes: list[str]) -> None:
    """Every proposer, shape and batch; prompts of different length; limits and ends inside accepted runs."""
    world = worlds(family)
    prompts = [*PROMPTS, PROMPTS[1][:4], PROMPTS[2][3:20]]
    answers = [*world.answers, *(transformers_answer(world.target, p, ANSWER_TOKENS) for p in prompts[3:])]
    kept: dict[str, float] = {}
    for name, proposer in proposers(world).items():
        for shape, plan in ((shape, PLANS[shape]) for shape in shapes):
            if plan.kind != "chain" and name in MODEL_FREE:
                continue
            runs: list[Generation] = []
            for start in range(0, len(prompts), batch):
                group = prompts[start : start + batch]
                runs += speculative_generate(world.target, proposer, group, decoding(plan)).answers
            assert [run.tokens for run in runs] == answers, (name, shape)
            for run in runs:
                assert sum(entry.num_emitted for entry in run.rounds) + 1 == len(run.tokens) == ANSWER_TOKENS
                assert all(entry.num_accepted <= plan.num_draft_tokens for entry in run.rounds)
                assert all(entry.num_emitted == entry.num_accepted + 1 for entry in run.rounds[:-1])
            kept[f"{name} {shape}"] = acceptance_length(runs)
    assert kept["head chain 4"] > 1.3  # drafts were kept
    assert kept["head chain 4"] < 5  # and rejected
    assert kept["head static 3 2 1"] >= kept["head chain 3"]


@pytest.mark.parametrize("plan", ["static 1 3", "dynamic 4"])
def test_tree_finds_what_transformers_finds_for_every_draft_width(worlds: Any, plan: str) -> None:
    world = worlds("llama")
    for static_shapes in (False, True):
        found = speculative_generate(
            world.target, world.drafters[36], PROMPTS, decoding(PLANS[plan], static_shapes=static_shapes)
        )
        assert [run.tokens for run in found.answers] == world.answers


@pytest.mark.parametrize("plan", [static_tree(1, 1, 1), dynamic_tree(3, 1, 3)])
def test_tree_of_width_one_is_the_chain(worlds: Any, plan: DraftPlan) -> None:
    world = worlds("llama")
    trees, chains = (
        speculative_generate(world.target, world.drafters[36], PROMPTS, decoding(shape)).answers
        for shape in (plan, chain(3))
    )
    assert [run.tokens for run in trees] == [run.tokens for run in chains]
    assert [[entry.num_accepted for entry in run.rounds] for run in trees] == [
        [entry.num_accepted for entry in run.rounds] for run in chains
    ]


def test_row_does_not_depend_on_the_others_in_its_batch(worlds: Any) -> None:
    world = worlds("llama")
    settings = decoding(chain(3))
    alone = [speculative_generate(world.target, world.drafters[36], [p], settings).answers[0] for p in PROMPTS]
    for order in ([0, 1, 2], [2, 0, 1], [1, 1, 0, 2, 2]):
        together = speculative_generate(world.target, world.drafters[36], [PROMPTS[i] for i in order], settings)
        for index, run in zip(order, together.answers, strict=True):
            assert run.tokens == alone[index].tokens
            assert [e.num_accepted for e in run.rounds] == [e.num_accepted for e in alone[index].rounds]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_of_an_untrained_drafter_is_the_same(worlds: Any, tiny_drafter: Any, family: str) -> None:
    world = worlds(family)
    drafter = tiny_drafter(world.target, 20, aux_layers=(1, 3), fc_norm=True, norm_output=True)
    found = speculative_generate(world.target, drafter, PROMPTS, decoding(chain(5), 20))
    assert [run.tokens for run in found.answers] == [answer[:20] for answer in world.answers]


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_output_is_that_of_transformers(worlds: Any, family: str) -> None:
    world = worlds(family)
    found = plain_generate(world.target, PROMPTS, decoding(chain(1)))
    assert [run.tokens for run in found.answers] == world.answers
    assert all(run.rounds == [] for run in found.answers)


def test_penalised_greedy_output_is_that_of_transformers(worlds: Any) -> None:
    """The repetition penalty sees each position's own history, drafts included."""
    world = worlds("llama")
    sampling = SamplingConfig(temperature=0.0, top_k=None, top_p=1.0, min_p=0.0, repetition_penalty=1.7)
    wanted = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        output = world.target.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER_TOKENS, do_sample=False, pad_token_id=0,
            eos_token_id=None, repetition_penalty=1.7,
        )  # fmt: skip
        wanted.append(output[0, len(prompt) :].tolist())
    assert wanted != world.answers
    settings = decoding(chain(3), sampling=sampling)
    assert [run.tokens for run in plain_generate(world.target, PROMPTS, settings).answers] == wanted
    for plan in (chain(3), static_tree(2, 2)):
        found = speculative_generate(world.target, world.drafters[36], PROMPTS, decoding(plan, sampling=sampling))
        assert [run.tokens for run in found.answers] == wanted


@pytest.mark.parametrize("family", ["llama", "gpt2"])
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
            assert plain_generate(world.target, [prompt], decoding(chain(1))).answers[0].tokens == wanted
            assert wanted == answer[: position + 1]
            for limit, cause in ((ANSWER_TOKENS, "end of turn"), (position, "limit")):
                settings = decoding(chain(4), limit)
                run, _ = speculative_generate(world.target, world.drafters[None], [prompt, prompt], settings).answers
                assert run.tokens == wanted[:limit]
                assert sum(entry.num_emitted for entry in run.rounds) + 1 == len(run.tokens)
                ended_in_accepted_run[cause] += bool(run.rounds) and (
                    run.rounds[-1].num_accepted == run.rounds[-1].num_emitted
                )
    assert all(ended_in_accepted_run.values()), ended_in_accepted_run


def test_drafter_takes_in_the_rows_that_a_fresh_forward_pass_gives(
    worlds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = worlds("qwen3")
    drafter = world.drafters[None]
    observe = drafter.observe
    seen: list[tuple[Tensor, list[int]]] = []

    def record(state: Any, features: TargetFeatures, next_ids: Tensor, counts: Tensor) -> None:
        count = int(counts[0])
        seen.append((features.aux_hidden_states[0, :count], next_ids[0, :count].tolist()))
        observe(state, features, next_ids, counts)

    monkeypatch.setattr(drafter, "observe", record)
    for plan in (chain(3), static_tree(2, 2, 1)):
        seen.clear()
        run = speculative_generate(world.target, drafter, [PROMPTS[1]], decoding(plan)).answers[0]
        rejected = [entry for entry in run.rounds if entry.num_accepted < 3]
        assert len(run.rounds) > len(rejected) > 3  # rollbacks, and rounds without
        text = torch.tensor([PROMPTS[1] + run.tokens])
        with torch.no_grad():
            output = world.target.model(input_ids=text, use_cache=False, output_hidden_states=True)
        fresh = torch.cat([output.hidden_states[i][0] for i in drafter.wants.aux_layers], dim=-1)
        known = text.shape[1] - 1  # the drafter took in every token but the last, each with its successor
        ids = [token for _, tokens in seen for token in tokens]
        assert ids[:known] == text[0, 1:].tolist()
        assert (torch.cat([rows for rows, _ in seen])[:known] - fresh[:known]).abs().max() < 1e-10


def test_trace_tells_every_draft_and_its_fate(worlds: Any) -> None:
    world = worlds("llama")
    target = world.target
    run = speculative_generate(target, world.drafters[36], [PROMPTS[0]], decoding(chain(3), trace=True)).answers[0]
    text = [*PROMPTS[0], run.tokens[0]]
    for entry in run.rounds:
        assert entry.drafts is not None
        assert [d["parent"] for d in entry.drafts] == [-1, 0, 1] and [d["draft_prob"] for d in entry.drafts] == [
            1.0
        ] * 3
        assert sum(bool(d["accepted"]) for d in entry.drafts) >= entry.num_accepted
        ids = torch.tensor([[*text, *(int(d["token"]) for d in entry.drafts)]])
        with torch.no_grad():
            probs = target.model(input_ids=ids, use_cache=False).logits[0, len(text) - 1 :].softmax(-1)
        for row, draft in zip(probs[:3], entry.drafts, strict=True):
            assert draft["target_prob"] == pytest.approx(float(row[int(draft["token"])]), rel=1e-5)
        text += run.tokens[len(text) - len(PROMPTS[0]) :][: entry.num_emitted]


@pytest.mark.parametrize("plan", [chain(3), static_tree(2, 1)])
def test_sampling_repeats_with_the_seed_and_only_then(worlds: Any, plan: DraftPlan) -> None:
    world = worlds("llama")
    runs = [
        speculative_generate(
            world.target, world.drafters[36], PROMPTS[:1], decoding(plan, 20, SAMPLED),
            torch.Generator().manual_seed(seed),
        ).answers[0].tokens
        for seed in (1, 1, 2, 3)
    ]  # fmt: skip
    assert runs[0] == runs[1]
    assert len({tuple(run) for run in runs}) == 3
