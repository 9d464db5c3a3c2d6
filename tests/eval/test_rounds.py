"""Rounds are counted as worked out by hand, with a target and a drafter that follow a script."""

from typing import Any

import pytest
import torch
from torch import Tensor

from data.batch import TargetFeatures, Wants
from data.cache import TargetCache
from eval.generate import speculative_generate
from tests.eval.decoding import decoding
from train.drafters.base import Draft, DraftPlan, chain


class CountingTarget:
    """Greedy text 101 102 103 ... after any prompt, by the number of tokens in the cache; its margins shrink by 1."""

    device = torch.device("cpu")
    prompt = (7, 7, 7)

    def __init__(self, *eos: int) -> None:
        self.eos_token_ids = frozenset(eos)

    def new_cache(self, batch_size: int, capacity: int, static_shapes: bool) -> TargetCache:
        return TargetCache(batch_size, capacity, self.device, static_shapes)

    def step(self, ids: Tensor, cache: Any, wants: Wants, visible: Any = None) -> tuple[Tensor, TargetFeatures]:
        positions = cache.lengths[:, None] + torch.arange(ids.shape[1])
        cache.begin(ids.shape[1])
        text_index = positions + 1 - len(self.prompt)
        rows = torch.nn.functional.one_hot(101 + text_index.clamp_min(0), 200) * (50.0 - text_index)[..., None]
        return rows, TargetFeatures(ids[..., None], None)

    def logits(self, states: Tensor) -> Tensor:
        return states


class ScriptedDrafter:
    """Drafts the target's text, but for chosen tokens."""

    wants = Wants(aux_layers=(), last_hidden_state=False)

    def __init__(self, *wrong: int) -> None:
        self.wrong = wrong

    def start(self, prompts: Any, max_tokens: int) -> Any:
        class Texts(list[int]):
            def keep(self, sequences: Tensor) -> None:
                assert not len(sequences)

        return Texts()

    def observe(self, state: list[int], features: TargetFeatures, next_ids: Tensor, counts: Tensor) -> None:
        assert features.aux_hidden_states.shape[1] == next_ids.shape[1]
        state += next_ids[0, : int(counts[0])].tolist()

    def propose(self, state: list[int], plan: DraftPlan, warp: Any, generator: Any) -> Draft:
        assert warp is None  # greedy
        drafts = [state[-1] + 1 + k for k in range(plan.num_draft_tokens)]
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
    (run,) = speculative_generate(target, drafter, [list(target.prompt)], decoding(chain(4), max_tokens)).answers
    assert run.tokens == list(range(101, last + 1))
    assert [(entry.num_accepted, entry.num_emitted) for entry in run.rounds] == rounds


def test_target_gap_is_the_smallest_margin_among_the_rows_that_decided() -> None:
    target: Any = CountingTarget()
    drafter: Any = ScriptedDrafter(105)
    (run,) = speculative_generate(target, drafter, [list(target.prompt)], decoding(chain(4), 10)).answers
    # Token 101 + i has margin 50 - i. Round 1 decides 102..105 (correction), round 2 decides 106..110 (bonus).
    assert [(entry.num_accepted, entry.target_gap) for entry in run.rounds] == [(3, 46.0), (4, 41.0)]
