"""Targets of which most layers have a running state instead of keys and values, against transformers' own forward pass.

Float64 models are given the gated delta rule in float64 (tests/delta_rule.py).
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from conf import InputError
from data.batch import TargetFeatures, Wants
from data.target import Target, TargetConfig
from eval.generate import plain_generate, speculative_generate
from tests.conftest import RUNNING_STATE
from tests.data.test_target import assert_close, packs_of, whole
from tests.delta_rule import use_exact_rule
from tests.eval.decoding import decoding, static_tree
from tests.families import tiny_family
from train.drafters.base import Draft, DraftPlan, DraftState, Proposer, chain

WANTS = Wants(aux_layers=(0, 1, 4, 7), last_hidden_state=True)


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    use_exact_rule(monkeypatch)


@pytest.mark.parametrize("family", RUNNING_STATE)
def test_the_rule_is_transformers(tiny_target: Any, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(family, torch.float64)
    ids = packs_of((9,), width=9).input_ids[0]
    theirs = whole(target, ids)[0][1]  # of one layer, before anything grows
    use_exact_rule(monkeypatch)
    ours = whole(target, ids)[0][1]
    assert not torch.equal(ours, theirs)  # it was called
    assert (ours - theirs).norm() <= 1e-6 * theirs.norm()


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("family", RUNNING_STATE)
def test_documents_of_a_pack_do_not_see_each_other(tiny_target: Any, family: str) -> None:
    target = tiny_target(family, torch.float64)
    assert not target.decoder.can_forget
    batch = packs_of((7, 1, 140), (90, 60), width=150)
    features = target.capture(batch, WANTS)
    ids, aux = batch.input_ids.flatten(), features.aux_hidden_states.flatten(0, 1)
    assert features.last_hidden_state.shape == (2, 150, 32)
    for start, end in batch.document_spans():
        hidden_states, logits = whole(target, ids[start:end])
        assert_close(aux[start:end], torch.cat([hidden_states[i][0] for i in WANTS.aux_layers], dim=-1))
        assert_close(target.logits(features.last_hidden_state.flatten(0, 1)[start:end]), logits)
    early = target.capture(batch, Wants((1, 4), False))
    assert early.last_hidden_state is None and torch.equal(
        early.aux_hidden_states, features.aux_hidden_states[..., 32:96]
    )


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("family", RUNNING_STATE)
def test_drafts_that_were_not_kept_leave_no_trace(tiny_target: Any, family: str) -> None:
    """Two texts of different length that keep 1 and 3, then none and all, then leave the batch."""
    target = tiny_target(family, torch.float64)
    long, short = packs_of((14,), (14,), width=14, seed=3).input_ids
    cache = target.new_cache(2, 24)
    found: dict[int, list[Tensor]] = {0: [], 1: []}

    def read(rows: list[Tensor], counts: list[int], sequences: tuple[int, ...] = (0, 1)) -> None:
        last, _ = target.step(torch.stack(rows), cache, WANTS)
        cache.commit(torch.tensor(counts))
        for row, sequence in enumerate(sequences):
            found[sequence].append(last[row, : counts[row]])

    def wrong(ids: Tensor) -> Tensor:
        return (ids + 1) % 256

    read([long[:5], torch.cat([short[:2], wrong(short[2:5])])], [5, 2])  # prompts, padded on the right
    read([torch.cat([long[5:6], wrong(long[6:9])]), short[2:6]], [1, 3])
    read([long[6:8], wrong(short[5:7])], [2, 0])
    read([long[8:9], short[5:6]], [1, 1])
    cache.keep(torch.tensor([1]))
    read([torch.cat([short[6:9], wrong(short[9:10])])], [3], (1,))
    read([short[9:14]], [5], (1,))
    for ids, lasts in ((long[:9], found[0]), (short, found[1])):
        assert_close(target.logits(torch.cat(lasts)), whole(target, ids)[1])


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("family", RUNNING_STATE)
def test_greedy_text_is_the_targets_own(tiny_target: Any, family: str) -> None:
    target = tiny_target(family, torch.float64)
    prompts = [[3, 17], [5, 9, 30, 2, 2, 11, 7], [40], [8, 9, 8, 9, 8, 9, 8]]
    wanted = [run.tokens for run in plain_generate(target, prompts, decoding(chain(1), 40)).answers]
    for prompt, tokens in zip(prompts, wanted, strict=True):
        logits = whole(target, torch.tensor(prompt + tokens))[1]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens
    for drafter in (head_of("eagle3", target), head_of("mtp", target), head_of("medusa", target)):
        found = speculative_generate(target, drafter, prompts, decoding(chain(3), 40)).answers
        assert [run.tokens for run in found] == wanted
    found = speculative_generate(target, Knowing(prompts, wanted), prompts, decoding(chain(3), 40)).answers
    assert [run.tokens for run in found] == wanted
    assert {entry.num_accepted for run in found for entry in run.rounds} == {0, 1, 2, 3}


class Knowing(Proposer):
    """Drafts the right text, but for one token of each draft, at a place that changes."""

    wants = Wants(aux_layers=(), last_hidden_state=False)

    def __init__(self, prompts: list[list[int]], answers: list[list[int]]) -> None:
        self.texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]

    def start(self, prompts: Any, max_tokens: int) -> "Places":
        return Places(torch.arange(len(prompts)), torch.ones(len(prompts), dtype=torch.int64))

    def observe(self, state: "Places", features: TargetFeatures, next_ids: Tensor, counts: Tensor) -> None:
        state.lengths = state.lengths + counts

    def propose(self, state: "Places", plan: DraftPlan, warp: Any, generator: Any) -> Draft:
        rows = []
        for text, length in zip(state.texts.tolist(), state.lengths.tolist(), strict=True):
            row = [*self.texts[text][length : length + 3], 0, 0, 0][:3]
            at = (length * 7 + text) % 4
            rows.append([(token + 1) % 256 if place == at else token for place, token in enumerate(row)])
        return Draft(torch.tensor(rows), None)


@dataclass
class Places(DraftState):
    """Which texts are still running, and how long they are."""

    texts: Tensor
    lengths: Tensor

    def keep(self, sequences: Tensor) -> None:
        self.texts, self.lengths = self.texts[sequences], self.lengths[sequences]


def head_of(family: str, target: Target) -> Any:
    return (
        tiny_family(family, target, None, noise=0.02, init_layer=None)
        .to(target.model.dtype)
        .requires_grad_(False)
        .eval()
    )


def test_what_needs_a_memory_of_keys_is_refused(tiny_target: Any) -> None:
    target = tiny_target("qwen3_5_text")
    with pytest.raises(InputError, match="reads no trees: draft=chain"):
        speculative_generate(target, head_of("mtp", target), [[3, 17]], decoding(static_tree(2, 2), 8))
    for family in ("early_exit", "draft_model"):
        with pytest.raises(ValueError, match="cannot forget drafts"):
            tiny_family(family, target, None)
    settings = TargetConfig(
        name="tiny", path=target.folder, revision=None, dtype="float32", chat_template_kwargs={},
        trust_remote_code=False, compile=True,
    )  # fmt: skip
    with pytest.raises(InputError, match=r"target\.compile=false"):
        Target(settings)


def test_other_kinds_of_layers_are_refused(tiny_target: Any) -> None:
    with pytest.raises(InputError, match="compressed_sparse_attention layers: not supported yet"):
        tiny_target("qwen3", layer_types=["full_attention"] * 7 + ["compressed_sparse_attention"])
