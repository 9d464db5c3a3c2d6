"""What must hold for the decoding of every family: lossless, and as the round-walk says."""

from typing import Any

import pytest
import torch

from data.encode import Document
from data.packing import collate_alone
from eval.generate import speculative_generate
from tests.eval.decoding import SAMPLED, decoding, dynamic_tree, static_tree
from tests.eval.test_generate import ANSWER_TOKENS, PROMPTS, VOCAB, acceptance_length, train, transformers_answer
from tests.eval.test_lossless import ALPHA, next_token_logits, smallest_p
from tests.eval.test_lossless import PROMPTS as SHORT_PROMPTS
from tests.eval.test_lossless import World as SampledWorld
from tests.families import NAMES, as_served, longest_chain, tiny_family
from train.acceptance import round_walk
from train.drafters.base import chain

TARGETS = ["llama", "qwen3", "gemma3_text", "gpt2"]
OVERFITTED = 0.95


@pytest.fixture(scope="module")
def taught(tiny_target: Any) -> Any:
    """taught(name, family) -> target, drafter trained on its answers to PROMPTS for a moment, the answers; float64."""
    made: dict[tuple[str, str], Any] = {}

    def make(name: str, family: str = "llama") -> Any:
        key = (name, family)
        if key not in made:
            shape = {"vocab_size": VOCAB, "num_hidden_layers": 4}
            target, teacher = (tiny_target(family, dtype, **shape) for dtype in (torch.float64, torch.float32))
            answers = [transformers_answer(target, prompt, ANSWER_TOKENS) for prompt in PROMPTS]
            drafter = tiny_family(name, teacher, 36, noise=0.1, init_layer=None, aux_layers=(1, 2, 3), num_layers=2)
            state = train(drafter, teacher, answers, 60).state_dict()
            drafter = tiny_family(name, target, 36, init_layer=None, aux_layers=(1, 2, 3), num_layers=2)
            drafter.load_state_dict(state)
            served = as_served(target, drafter)
            answers = [transformers_answer(served, prompt, ANSWER_TOKENS) for prompt in PROMPTS]
            made[key] = served, drafter.requires_grad_(False).eval(), answers
        return made[key]

    return make


@pytest.mark.parametrize("family", TARGETS)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_output_is_that_of_transformers(taught: Any, name: str, family: str) -> None:
    target, drafter, answers = taught(name, family)
    longest = longest_chain(drafter, 8)
    plans = [chain(1), chain(3), chain(longest), static_tree(3, 2, 1), dynamic_tree(4, 3, 7)]
    for plan in plans:
        for prompts, wanted in ((PROMPTS, answers), (PROMPTS[1:2], answers[1:2])):
            found = speculative_generate(target, drafter, prompts, decoding(plan)).answers
            assert [run.tokens for run in found] == wanted, plan


@pytest.mark.parametrize("name", NAMES)
def test_rounds_are_those_of_the_walk(taught: Any, name: str) -> None:
    """The round-walk of training, over the same answers, finds the decoder's rounds one by one."""
    target, drafter, _ = taught(name)
    for num_draft_tokens in (1, longest_chain(drafter, 4)):
        found = speculative_generate(target, drafter, PROMPTS, decoding(chain(num_draft_tokens))).answers
        for prompt, run in zip(PROMPTS, found, strict=True):
            text = Document(prompt + run.tokens, [False] * len(prompt) + [True] * len(run.tokens), "test")
            batch = collate_alone(text, 80)
            walked = round_walk(drafter, batch, target.capture(batch, drafter.wants), num_draft_tokens)
            assert walked == [[entry.num_accepted for entry in run.rounds]]


@pytest.mark.parametrize("name", NAMES)
def test_row_does_not_depend_on_the_others_in_its_batch(taught: Any, name: str) -> None:
    target, drafter, _ = taught(name)
    alone = [speculative_generate(target, drafter, [p], decoding(chain(3))).answers[0] for p in PROMPTS]
    together = speculative_generate(target, drafter, PROMPTS[::-1], decoding(chain(3))).answers[::-1]
    for one, other in zip(alone, together, strict=True):
        assert [entry.num_accepted for entry in one.rounds] == [entry.num_accepted for entry in other.rounds]


@pytest.mark.parametrize("name", NAMES)
def test_overfitted_drafter_is_accepted(tiny_target: Any, name: str) -> None:
    """200 steps on one conversation: at least 95 % of all drafts are kept."""
    target = tiny_target("llama", torch.float64, vocab_size=VOCAB, num_hidden_layers=4)
    answer = transformers_answer(target, PROMPTS[1], ANSWER_TOKENS)
    # A random target is often of two minds (logits .01 apart): the text, not its distribution, is what can be learned.
    drafter = tiny_family(
        name, target, noise=0.05, init_layer=None, aux_layers=(1, 2, 3), num_layers=2, ttt_steps=5, loss="ce",
        preservation_weight=30.0,
    )  # fmt: skip
    train(drafter, target, [answer], 200, PROMPTS[1:2])
    target = as_served(target, drafter)
    length = longest_chain(drafter, 5)
    (found,) = speculative_generate(target, drafter, PROMPTS[1:2], decoding(chain(length))).answers
    assert found.tokens == answer
    assert acceptance_length([found]) >= 1 + OVERFITTED * length - length / len(found.rounds)  # the last round is cut


@pytest.mark.parametrize("plan", [chain(3), static_tree(2, 2)], ids=["chain", "tree"])
@pytest.mark.parametrize("name", NAMES)
def test_sampled_tokens_follow_the_targets_law(tiny_target: Any, name: str, plan: Any) -> None:
    target = tiny_target("llama", torch.float64, vocab_size=6, num_hidden_layers=3)
    drafter = tiny_family(name, target, 5, aux_layers=(1, 2), num_layers=2).eval().requires_grad_(False)
    target = as_served(target, drafter)
    world = SampledWorld(target, drafter, next_token_logits(target))
    assert smallest_p(world, drafter, plan, SAMPLED, 8_000) > ALPHA / len(SHORT_PROMPTS)
