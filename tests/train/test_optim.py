"""Schedules by hand arithmetic, and which optimizer really got which parameter."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conf.cli import build, check_overrides
from tests.train.conftest import Launcher, rows
from train.optim import OptimConfig, deepspeed_optimizer, schedule_factory
from train.state_files import load_state

MATRICES = {
    "fc.weight", "midlayer.self_attn.q_proj.weight", "midlayer.self_attn.k_proj.weight",
    "midlayer.self_attn.v_proj.weight", "midlayer.self_attn.o_proj.weight", "midlayer.mlp.gate_proj.weight",
    "midlayer.mlp.up_proj.weight", "midlayer.mlp.down_proj.weight",
}  # fmt: skip


def config(**changes: Any) -> OptimConfig:
    values: dict[str, Any] = {
        "name": "adamw", "lr": 1.0, "muon_lr": 10.0, "adapter_lr": 0.5, "momentum": 0.9, "ns_method": "standard",
        "betas": (0.8, 0.99), "eps": 1e-7,
        "weight_decay": 0.5, "schedule": "cosine", "warmup_ratio": 0.0, "decay_ratio": 0.3, "clip": 1.0,
    }  # fmt: skip
    return OptimConfig(**(values | changes))


def rates(optim: OptimConfig, steps: int, peaks: tuple[float, ...] = (1.0,)) -> list[list[float]]:
    """Learning rates of each step, of one SGD parameter group per peak."""
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": peak} for peak in peaks]
    optimizer = torch.optim.SGD(groups)
    schedule = schedule_factory(optim, steps)(optimizer)
    seen = []
    for _ in range(steps):
        seen.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return seen


def flat(values: list[list[float]]) -> list[float]:
    return [value for (value,) in values]


def test_cosine_falls_from_peak_to_nearly_zero() -> None:
    found = flat(rates(config(), 4))
    assert found == pytest.approx([1, (2 + math.sqrt(2)) / 4, 0.5, (2 - math.sqrt(2)) / 4])
    assert flat(rates(config(), 1000))[-1] == pytest.approx(0, abs=1e-5)


def test_warm_up_rises_linearly_over_its_share_of_the_steps() -> None:
    found = flat(rates(config(warmup_ratio=0.4), 10))
    assert found[:5] == pytest.approx([0, 0.25, 0.5, 0.75, 1])
    # Then the cosine over the remaining six steps.
    assert found[5:] == pytest.approx([(1 + math.cos(math.pi * step / 6)) / 2 for step in range(1, 6)])


def test_wsd_is_stable_then_decays_linearly_over_the_last_share() -> None:
    found = flat(rates(config(schedule="wsd", warmup_ratio=0.2, decay_ratio=0.4), 10))
    assert found == pytest.approx([0, 0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])


def test_constant_stays_after_warm_up() -> None:
    assert flat(rates(config(schedule="constant", warmup_ratio=0.25), 8)) == pytest.approx([0, 0.5, 1, 1, 1, 1, 1, 1])
    assert flat(rates(config(schedule="constant"), 3)) == [1, 1, 1]


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_groups_of_different_peaks_follow_one_schedule(schedule: str) -> None:
    found = rates(config(schedule=schedule, warmup_ratio=0.2), 10, peaks=(0.5, 20.0))
    assert max(high for _, high in found) == 20.0
    assert [high for _, high in found] == pytest.approx([40 * low for low, _ in found])


def test_adamw_section_holds_exactly_what_the_config_says() -> None:
    section = deepspeed_optimizer(config())
    assert section["type"] == "AdamW"
    assert {key: section["params"][key] for key in ("lr", "betas", "eps", "weight_decay")} == {
        "lr": 1.0, "betas": [0.8, 0.99], "eps": 1e-7, "weight_decay": 0.5,
    }  # fmt: skip


@pytest.fixture(scope="module")
def muon_state(
    launcher: Launcher, tiny_args: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], dict[str, Any], Path]:
    """(optimizer state after step 2, after step 4, run folder) of a 4-step Muon run as DeepSpeed saved it."""
    folder = tmp_path_factory.mktemp("muon")
    settings = ("optim=muon", "optim.schedule=wsd", "optim.decay_ratio=0.5", "epochs=1", "data.global_batch_packs=1")
    argv = tiny_args(folder / "out", *settings, "checkpoint_every_steps=2", "keep_checkpoints=9")
    launcher("train", argv, folder).succeeded()
    assert len(rows(folder / "out")) == 4
    states = [
        load_state(folder / f"out/checkpoints/step-00000{step}/engine/mp_rank_00_model_states.pt")["optimizer"]
        for step in (2, 4)
    ]
    return states[0], states[1], folder / "out"


def test_muon_gets_the_matrices_and_adamw_norms_and_lm_head(muon_state: Any, tiny_args: Any) -> None:
    from data.prepare import prepare
    from data.target import Target
    from train.job import build_drafter

    state, _, run = muon_state
    job = build(check_overrides("train", tiny_args(run)))
    target = Target(job.target)
    drafter = build_drafter(job, target, prepare(target, job.corpus, 256, 2, 0))
    shapes = {name: tuple(p.shape) for name, p in drafter.named_parameters()}
    for use_muon, names, buffer in (
        (True, MATRICES, "momentum_buffer"), (False, shapes.keys() - MATRICES, "exp_avg"),
    ):  # fmt: skip
        (group,) = [group for group in state["param_groups"] if group["use_muon"] is use_muon]
        found = sorted(tuple(state["state"][index][buffer].shape) for index in group["params"])
        assert found == sorted(shapes[name] for name in names)
    assert "lm_head.weight" in shapes.keys() - MATRICES


def test_both_learning_rates_follow_the_schedule(muon_state: Any) -> None:
    # conf/optim/muon.yaml: 9e-2 for Muon, 1e-3 for AdamW; stable for 2 of 4 steps, then down to 0 at the end.
    for state, factor in zip(muon_state[:2], (1.0, 0.0), strict=True):
        found = {group["use_muon"]: group["lr"] for group in state["param_groups"]}
        assert found == pytest.approx({True: 9e-2 * factor, False: 1e-3 * factor})


def test_muon_steps_with_its_own_settings(muon_state: Any) -> None:
    state = muon_state[0]
    groups = {group["use_muon"]: group for group in state["param_groups"]}
    assert (groups[True]["momentum"], groups[True]["weight_decay"], groups[True]["ns_method"]) == (
        0.6,
        0.01,
        "gram",
    )
    assert (list(groups[False]["betas"]), groups[False]["eps"]) == ([0.9, 0.95], 1e-8)
    assert groups[False]["weight_decay"] == 0.01


def test_eight_bit_adamw_keeps_a_byte_per_element_and_trains(
    launcher: Launcher, tiny_args: Callable[..., list[str]], tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    curves = {}
    for name in ("adamw", "adamw_8bit"):
        argv = tiny_args(tmp_path / name, f"optim={name}", "epochs=2", "data.global_batch_packs=1")
        launcher("train", argv, tmp_path).succeeded()
        curves[name] = [row["loss"] for row in rows(tmp_path / name)]
    (path,) = (tmp_path / "adamw_8bit/checkpoints/latest").resolve().glob("engine/mp_rank_00_model_states.pt")
    states = [
        state.get("__bnb_optimizer_quant_state__", state)["state1"]
        for state in load_state(path)["optimizer"]["state"].values()
    ]
    large = [state for state in states if state.numel() >= 4096]  # smaller ones stay float32
    assert large and all(state.dtype == torch.uint8 for state in large)
    assert curves["adamw_8bit"] == pytest.approx(curves["adamw"], rel=1e-2)
    assert curves["adamw_8bit"] != curves["adamw"]


@pytest.mark.parametrize("optim", ["muon", "adamw"])
def test_adapters_have_a_rate_of_their_own(
    launcher: Launcher, tiny_args: Callable[..., list[str]], tmp_path: Path, optim: str
) -> None:
    """At Muon's rate a few steps of LoRA would make another model of the target."""
    settings = (
        "drafter=medusa2",
        "drafter.draft_vocab_size=null",
        "drafter.num_heads=2",
        "num_draft_tokens=2",
        f"optim={optim}",
    )
    constant = ("optim.schedule=constant", "optim.warmup_ratio=0", "optim.adapter_lr=0.007", "epochs=0.2")
    argv = [argument for argument in tiny_args(tmp_path / "out") if not argument.startswith("drafter")]
    launcher("train", [*argv, *settings, *constant], tmp_path).succeeded()
    (path,) = (tmp_path / "out" / "checkpoints" / "best" / "engine").glob("*.pt")
    groups = load_state(path)["optimizer"]["param_groups"]
    layers, matrices = 8, 7  # tiny Qwen3: q, k, v, o, gate, up, down, of which each has a pair of adapters
    adapters = [group for group in groups if group["lr"] == 0.007]
    assert sum(len(group["params"]) for group in adapters) == 2 * matrices * layers
    others = {group["lr"] for group in groups if group["lr"] != 0.007}
    assert others <= ({9e-2, 1e-3} if optim == "muon" else {4e-4}) and others
