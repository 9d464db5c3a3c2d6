"""Model FLOPs utilisation by hand, and in what a run writes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.train.conftest import Launcher, rows
from train.roofline import Usage, matmul_flops_per_second


def test_utilisation_and_shares_by_hand() -> None:
    usage = Usage()
    usage.add(Usage(seconds=6.0, feature_seconds=1.0, drafter_seconds=3.0, flops=500))
    usage.add(Usage(seconds=4.0, feature_seconds=1.0, drafter_seconds=2.0, flops=500))
    report = usage.report(matmul_rate=400.0)
    assert report["mfu"] == pytest.approx(0.5)  # 1000 FLOPs in 5 s at 400 FLOP/s: 2.5 s at best
    assert report["time_share"] == pytest.approx({"features": 0.2, "drafter": 0.5, "other": 0.3})


def test_the_measured_rate_counts_two_flops_per_multiply_add(monkeypatch: pytest.MonkeyPatch) -> None:
    # begin; time left?, start, end (0.5 s); time left?, start, end (0.25 s); time left? no
    clock = iter([0.0, 0.0, 1.0, 1.5, 2.0, 2.0, 2.25, 9.0])
    monkeypatch.setattr("train.roofline.PROBE_SECONDS", 2.5)
    monkeypatch.setattr("train.roofline.time.perf_counter", lambda: next(clock))
    rate = matmul_flops_per_second(torch.device("cpu"), torch.float32, rows=3, width=5)
    assert rate == 2 * 3 * (5 * 20) / 0.25  # (3, 5) @ (5, 20) in the faster of two


def test_every_run_reports_it(launcher: Launcher, tiny_args: Callable[..., list[str]], tmp_path: Path) -> None:
    launcher("train", tiny_args(tmp_path / "out", "optim=adamw", "epochs=1"), tmp_path).succeeded()
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    for report in (summary, *rows(tmp_path / "out")):
        assert 0 < report["mfu"] < 1
        assert sum(report["time_share"].values()) == pytest.approx(1)
