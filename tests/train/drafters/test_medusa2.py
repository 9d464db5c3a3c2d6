"""Medusa-2 changes a copy of the target's layers and nothing else."""

from pathlib import Path
from typing import Any

import pytest
import torch

from conf import InputError
from tests.families import as_served, settings_of, tiny_family
from tests.train.drafters.test_eagle3 import assert_relative, batch_of
from tests.train.test_warm_start import write
from train.warm_start import Head, read_head

CHANGED = {"lora_rank": 2, "preservation_weight": 3.0}


@pytest.fixture(scope="module")
def target(tiny_target: Any) -> Any:
    return tiny_target("llama", torch.float64)


def test_untrained_adapters_change_nothing_and_the_loss_is_medusas(target: Any) -> None:
    batch = batch_of([(4, 9), (3, 6)])
    heads = tiny_family("medusa", target, 200)
    drafter = tiny_family("medusa2", target, 200, noise=0.0)
    drafter.load_state_dict({**drafter.state_dict(), **heads.state_dict()})
    features = target.capture(batch, drafter.wants)
    ours = as_served(target, drafter).capture(batch, drafter.wants)
    assert_relative(ours.last_hidden_state, features.last_hidden_state)
    assert_relative(drafter.loss(batch, features).loss, heads.loss(batch, features).loss)  # the KL is 0


def test_loss_is_the_heads_and_what_the_target_lost(target: Any) -> None:
    batch = batch_of([(4, 9)])
    drafter = tiny_family("medusa2", target, 200, **CHANGED)
    features = target.capture(batch, drafter.wants)
    now = as_served(target, drafter).capture(batch, drafter.wants)
    heads = tiny_family("medusa", target, 200)
    heads.load_state_dict({k: v for k, v in drafter.state_dict().items() if not k.startswith("adapters.")})
    states = now.last_hidden_state.flatten(0, 1)
    # Tokens 4..12 are the answer: what the target says of each stands in the row before.
    log_p, log_q = (part.last_hidden_state[0] @ target.lm_head.T for part in (features, now))
    kl = (log_p.softmax(-1) * (log_p.log_softmax(-1) - log_q.log_softmax(-1))).sum(-1)
    lost = (kl[3:12] * batch.token_weights[0, 4:13]).sum()
    assert_relative(drafter.loss(batch, features).loss, heads.taught(states, batch, features).loss + 3.0 * lost)


def test_training_moves_the_twin_and_leaves_the_target(target: Any) -> None:
    batch = batch_of([(4, 9)])
    drafter = tiny_family("medusa2", target, 200, noise=0.05)
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    features = target.capture(batch, drafter.wants)
    optimizer = torch.optim.SGD(drafter.parameters(), lr=0.1)
    drafter.loss(batch, features).loss.backward()
    optimizer.step()
    assert target.model.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.model.state_dict().items())
    assert torch.equal(target.capture(batch, drafter.wants).last_hidden_state, features.last_hidden_state)
    served = as_served(target, drafter)
    assert not torch.equal(served.capture(batch, drafter.wants).last_hidden_state, features.last_hidden_state)
    theirs = {p.data_ptr() for p in target.model.parameters()}
    frozen = [p for p in served.model.parameters() if not p.requires_grad]
    assert frozen and all(p.data_ptr() in theirs for p in frozen)  # no second copy of the weights


def test_compiled_layers_of_the_target_are_not_what_the_twin_runs(tiny_target: Any) -> None:
    target = tiny_target("llama", torch.float64, seed=5)
    for layer in target.decoder.layers:
        layer.forward = layer.forward  # as `target.compile` leaves it: bound to the original's layer
    batch = batch_of([(4, 9)])
    drafter = tiny_family("medusa2", target, 200)
    features = target.capture(batch, drafter.wants)
    served = as_served(target, drafter).capture(batch, drafter.wants)
    assert not torch.equal(served.last_hidden_state, features.last_hidden_state)


def test_it_starts_from_medusas_heads_ours_or_anothers(target: Any, tmp_path: Path) -> None:
    heads = tiny_family("medusa", target)
    for head in (
        Head(tmp_path, dict(heads.state_dict()), {}, "medusa"),
        read_head(
            write(tmp_path / "theirs", {
                name.replace("blocks.", "").replace(".0.linear", ".0.linear"): p.detach()
                for name, p in heads.named_parameters()
            }, {}),
            settings_of("medusa2").families(),
        ),
    ):  # fmt: skip
        drafter = settings_of("medusa2", draft_vocab_size=None).build(target.parts, head.draft_to_target_ids(258))
        fresh = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}  # type: ignore[attr-defined]
        head.put_into(drafter, "medusa2")  # type: ignore[arg-type]
        for name, tensor in drafter.state_dict().items():  # type: ignore[attr-defined]
            wanted = fresh[name] if name.startswith("adapters.") else heads.state_dict()[name]
            assert torch.equal(tensor, wanted.to(tensor.dtype)), name


def test_scattered_adapters_are_refused(target: Any) -> None:
    batch = batch_of([(4, 9)])
    drafter = tiny_family("medusa2", target, 200)
    features = target.capture(batch, drafter.wants)
    for parameter in drafter.adapters.values():
        parameter.data = parameter.data.new_empty(0)  # as ZeRO-3 leaves it between a module's own calls
    with pytest.raises(InputError, match="ZeRO-3"):
        drafter.loss(batch, features)
