"""One loss curve, however a run is cut: ranks, accumulation, packing, ZeRO stage, launcher."""

import json
import math
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from conf.cli import build, check_overrides
from data.loader import DataConfig, TrainingStream
from data.prepare import prepare
from data.target import Target
from tests.train.conftest import Finished, Launcher, command, losses, rows
from train.job import build_drafter

FIRST, CURVE = 1e-6, 1e-5
"""Largest relative difference of the first loss, and of any loss of the curve."""
COMMON = ("data.global_batch_packs=2", "epochs=4", "num_draft_tokens=2")
PARTITION_ALL = "+deepspeed.zero_optimization.stage3_param_persistence_threshold=0"
"""Tiny parameters count as persistent under ZeRO-3; this partitions them all the same."""
Run = Callable[..., Path]


@pytest.fixture(scope="session")
def run(launcher: Launcher, tiny_args: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """run(optim, zero, ranks, *more) -> folder of a finished run; each is made once."""
    made: dict[tuple[Any, ...], tuple[Path, Finished]] = {}

    def make(optim: str, zero: str, ranks: int = 1, *more: str) -> Path:
        key = (optim, zero, ranks, *more)
        if key not in made:
            folder = tmp_path_factory.mktemp("run")
            extra = [PARTITION_ALL] if zero == "zero3" else []
            argv = tiny_args(folder / "out", *COMMON, f"optim={optim}", f"deepspeed={zero}", *extra, *more)
            made[key] = (folder / "out", launcher("train", argv, folder, ranks))
        folder, finished = made[key]
        finished.succeeded()
        return folder

    return make


@pytest.fixture(scope="session")
def pieces(tiny_args: Callable[..., list[str]]) -> dict[str, Any]:
    """What the command builds before DeepSpeed comes in."""
    job = build(check_overrides("train", tiny_args(Path("unused"), *COMMON)))
    target = Target(job.target)
    corpus = prepare(target, job.corpus, job.data.max_tokens, job.validation_conversations, job.seed)
    return {"job": job, "target": target, "corpus": corpus, "drafter": build_drafter(job, target, corpus)}


def total_loss(pieces: dict[str, Any], data: DataConfig) -> tuple[float, torch.Tensor]:
    """Loss and flattened gradient of the first global batch, by plain autograd."""
    target, drafter = pieces["target"], pieces["drafter"]
    stream = TrainingStream(pieces["corpus"].train, data, pieces["job"].seed, 1.0)
    drafter.zero_grad()
    total = 0.0
    for part in stream.micro_batches(0, 0, 1):
        result = drafter.loss(part.batch, target.capture(part.batch, drafter.wants))
        result.loss.backward()
        total += result.loss.item()
    return total, torch.cat([p.grad.flatten() for p in drafter.parameters() if p.requires_grad])


def assert_same_curve(run: Path, reference: Path) -> None:
    ours, theirs = losses(run), losses(reference)
    assert len(ours) == len(theirs) > 4
    assert ours[0] == pytest.approx(theirs[0], rel=FIRST)
    assert ours == pytest.approx(theirs, rel=CURVE)
    assert theirs[-1] < theirs[0]  # a curve that learns, not a constant


@pytest.mark.parametrize("optim", ["adamw", "muon"])
@pytest.mark.parametrize(
    ("zero", "ranks"),
    [("zero1", 1), ("zero2", 1), ("zero2_offload", 1), ("zero3", 1), ("zero0", 2), ("zero2", 2), ("zero3", 2)],
)
def test_loss_curve_is_the_same_at_every_zero_stage_and_number_of_ranks(
    run: Run, zero: str, ranks: int, optim: str
) -> None:
    assert_same_curve(run(optim, zero, ranks), run(optim, "zero0"))


def test_zero3_saves_the_whole_weights_that_zero0_trains(run: Run) -> None:
    ours, theirs = (
        load_file(run("adamw", zero, ranks) / "checkpoints" / "latest" / "model.safetensors")
        for zero, ranks in (("zero3", 2), ("zero0", 1))
    )
    assert {name: tensor.shape for name, tensor in ours.items()} == {n: t.shape for n, t in theirs.items()}
    for name, tensor in theirs.items():
        difference = (ours[name] - tensor).float().norm() / tensor.float().norm()
        assert difference < 1e-4, name  # AdamW divides rounding differences by small second moments


@pytest.mark.parametrize(("zero", "ranks"), [("zero0", 2), ("zero2", 2), ("zero3", 2)])
def test_summary_counts_the_parameters_whatever_the_partition(
    run: Run, pieces: dict[str, Any], zero: str, ranks: int
) -> None:
    counted = json.loads((run("adamw", zero, ranks) / "summary.json").read_text())["trainable_parameters"]
    assert counted == sum(p.numel() for p in pieces["drafter"].parameters() if p.requires_grad)


def test_one_pass_of_two_packs_equals_two_accumulated_passes(run: Run) -> None:
    assert_same_curve(run("adamw", "zero0", 1, "data.micro_batch_packs=2"), run("adamw", "zero0"))


def test_first_loss_is_that_of_plain_autograd(run: Run, pieces: dict[str, Any]) -> None:
    expected, _ = total_loss(pieces, pieces["job"].data)
    assert losses(run("adamw", "zero0"))[0] == pytest.approx(expected, rel=FIRST)


@pytest.mark.parametrize("normalisation", ["token", "sequence"])
def test_packed_and_unpacked_documents_have_equal_loss_and_gradient(pieces: dict[str, Any], normalisation: str) -> None:
    documents = len(pieces["corpus"].train)
    kinds = {
        "max_tokens": 256, "micro_batch_packs": 1, "loss_normalisation": normalisation, "feature_cache_gib": 0.0,
        "num_workers": 0,
    }  # fmt: skip
    whole = TrainingStream(
        pieces["corpus"].train, DataConfig(**kinds, packing=True, pack_tokens=256, global_batch_packs=1), 0, 1.0
    )
    assert whole.total_steps < documents  # packs really hold several documents
    packed, gradient = total_loss(
        pieces, DataConfig(**kinds, packing=True, pack_tokens=256, global_batch_packs=whole.total_steps)
    )
    alone, lone_gradient = total_loss(
        pieces, DataConfig(**kinds, packing=False, pack_tokens=256, global_batch_packs=documents)
    )
    assert alone == pytest.approx(packed, rel=FIRST)
    assert float((gradient - lone_gradient).norm() / gradient.norm()) < FIRST


@pytest.mark.parametrize(
    ("optim", "zero", "ranks"),
    [("adamw", "zero0", 1), ("adamw", "zero0", 2), ("muon", "zero0", 1), ("adamw", "zero2", 2), ("adamw", "zero3", 2)],
)
def test_reported_gradient_norm_is_that_of_the_unclipped_gradient(
    run: Run, pieces: dict[str, Any], optim: str, zero: str, ranks: int
) -> None:
    _, gradient = total_loss(pieces, pieces["job"].data)
    norm = float(gradient.norm())
    assert norm > 1  # clipping at 1.0 would show
    assert rows(run(optim, zero, ranks))[0]["gradient_norm"] == pytest.approx(norm, rel=1e-5)


def test_metrics_row_tells_the_learning_rate_of_its_own_step(run: Run) -> None:
    rates = [row["learning_rate"] for row in rows(run("adamw", "zero0"))]
    steps = len(rates)
    # conf/optim/adamw.yaml: peak 4e-4, cosine; 3 % of so few steps are no warm-up step.
    assert rates == pytest.approx([4e-4 * (1 + math.cos(math.pi * step / steps)) / 2 for step in range(steps)])


def test_bfloat16_precision_keeps_float32_weights_and_nearly_the_loss(run: Run) -> None:
    folder = run("adamw", "zero0", 1, "precision=bfloat16")
    weights = load_file(folder / "checkpoints" / "latest" / "model.safetensors")
    assert {tensor.dtype for name, tensor in weights.items() if name != "draft_to_target_ids"} == {torch.float32}
    reference = losses(run("adamw", "zero0"))
    assert losses(folder) == pytest.approx(reference, rel=0.02)
    assert losses(folder) != reference  # matrix products really were rounded to 8 bits


def test_job_ends_by_leaving_the_process_group(
    launcher: Launcher, tiny_args: Callable[..., list[str]], tmp_path: Path
) -> None:
    """A rank whose communication threads outlive Python's own end may abort after all its work was done."""
    argv = tiny_args(tmp_path / "run", *COMMON, "optim=adamw")
    finished = launcher("train", argv, tmp_path, ranks=2, kill=("deepspeed.comm.destroy_process_group", 1))
    assert finished.codes == [-9, -9]
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize("name", ["torchrun", pytest.param("deepspeed", marks=pytest.mark.slow)])
def test_launchers_start_two_ranks_that_train_like_one(
    run: Run, tiny_args: Callable[..., list[str]], tmp_path: Path, name: str
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    start = {
        "torchrun": ["torchrun", "--standalone", "--nproc-per-node", "2", "-m", "train"],
        "deepspeed": ["deepspeed", "--num_gpus", "2", "--master_port", port, "--no_local_rank", "--module", "train"],
    }[name]
    finished = command(*start, *tiny_args(tmp_path / "out", *COMMON, "optim=adamw"), cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert_same_curve(tmp_path / "out", run("adamw", "zero0"))
