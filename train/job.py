"""The training job, top to bottom: data, target, drafter, then steps, validations and checkpoints."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from omegaconf import DictConfig, OmegaConf
from pydantic import Field

from conf import InputError, config
from conf.cli import build
from conf.records import JsonLines, provenance, write_json, write_text
from data.corpus import CorpusConfig
from data.features import FeatureStore
from data.loader import DataConfig, TrainingStream
from data.prefetch import PreparedStep, prepared_steps
from data.prepare import PreparedCorpus, prepare
from data.target import Target, TargetConfig
from train.checkpoint import CheckpointWriter, Manifest, latest_checkpoint
from train.drafters.base import Drafter, DrafterConfig, require_reach
from train.engine import DeepSpeedConfig, Engine, Precision, StepResult, init_distributed, leave_distributed
from train.optim import OptimConfig
from train.progress import ProgressReport
from train.resume import previous_run
from train.roofline import Usage, matmul_flops_per_second
from train.tracker import Tracker, TrackerConfig
from train.validation import Validation
from train.warm_start import build_from_head


@config
class TrainJob:
    """Values: conf/train.yaml and the groups that it names."""

    run_name: str
    output_dir: str
    """Everything that the run leaves behind."""
    seed: int = Field(ge=0)
    target: TargetConfig
    drafter: DrafterConfig
    corpus: CorpusConfig
    data: DataConfig
    optim: OptimConfig
    deepspeed: DeepSpeedConfig
    tracker: TrackerConfig
    precision: Precision
    epochs: float = Field(gt=0, allow_inf_nan=False)
    """Passes over the corpus; a fraction ends within one."""
    validation_conversations: int = Field(ge=0)
    """Held out of the corpus: the target answers their prompts greedily, and the round-walk runs on these answers."""
    validation_tokens: int = Field(ge=2)
    """Longest validation answer."""
    num_draft_tokens: int = Field(ge=1)
    """K of the reported acceptance length."""
    validate_every_steps: int = Field(ge=1)
    checkpoint_every_steps: int = Field(ge=1)
    """A checkpoint is validated first. The last step always gets one."""
    keep_checkpoints: int = Field(ge=1)
    """The newest n, besides the best."""
    log_every_steps: int = Field(ge=1)
    resume: Literal["auto", "never"]
    """auto continues the run of the same name; never moves it aside and starts anew."""
    num_threads: int | None = Field(ge=1)
    """CPU threads per rank; None leaves torch's default."""


def run(composed: DictConfig) -> None:
    """`python -m train`: train one drafter and leave its checkpoints in `output_dir`.

    Raises:
        InputError: for anything that the user can mend.
    """
    started = time.monotonic()
    job: TrainJob = build(composed)
    rank, world_size = init_distributed()
    if job.num_threads is not None:
        torch.set_num_threads(job.num_threads)
    target = Target(job.target)
    corpus = prepare(target, job.corpus, job.data.max_tokens, job.validation_conversations, job.seed)
    drafter = build_drafter(job, target, corpus)
    previous_run(Path(job.output_dir), composed, job.resume, target.identity(), rank)
    Trainer(job, target, corpus, drafter, rank, world_size).train(OmegaConf.to_yaml(composed), started)
    leave_distributed()


def build_drafter(job: TrainJob, target: Target, corpus: PreparedCorpus) -> Drafter:
    """The drafter before training, with a draft vocabulary of the corpus's own unless it starts from a head."""
    torch.manual_seed(job.seed)
    longest = max(map(len, corpus.validation_prompts), default=0) + job.validation_tokens
    if longest > target.hf_config.max_position_embeddings:
        raise InputError(
            f"validation_tokens={job.validation_tokens}: prompt and answer need {longest} tokens, more than the "
            f"target's context of {target.hf_config.max_position_embeddings}"
        )
    drafter = build_from_head(
        job.drafter, target.parts, lambda: corpus.draft_vocabulary(target, job.drafter.draft_vocab_size)
    )
    if not isinstance(drafter, Drafter):
        name = job.drafter.name
        raise InputError(f"drafter {name} has nothing to train: run python -m eval +target=... +drafter={name}")
    require_reach(drafter, job.num_draft_tokens)
    return drafter


class Trainer:
    """One run: owns the step counter and everything that is written."""

    def __init__(
        self, job: TrainJob, target: Target, corpus: PreparedCorpus, drafter: Drafter, rank: int, world_size: int
    ) -> None:
        self.job, self.target, self.drafter = job, target, drafter
        self.rank, self.world_size = rank, world_size
        self.folder = Path(job.output_dir)
        self.stream = TrainingStream(corpus.train, job.data, job.seed, job.epochs)
        self.store = FeatureStore(target, drafter.wants, self.stream)
        self.validation = Validation(target, drafter.wants, corpus.validation_prompts, job.validation_tokens)
        self.trainable_parameters = drafter.num_trainable_parameters()
        accumulation = self.stream.accumulation_steps(world_size)
        total = self.stream.total_steps
        self.engine = Engine(drafter, job.optim, job.deepspeed, job.precision, accumulation, total)
        self.matmul_rate = matmul_flops_per_second(
            target.device, getattr(torch, job.precision), job.data.pack_tokens, target.hf_config.hidden_size
        )
        self.usage = Usage()
        self.writer = CheckpointWriter(self.folder, job.keep_checkpoints, rank == 0, self.engine.barrier)

    def train(self, config_yaml: str, started: float) -> None:
        """Run from the last checkpoint, or the start, to the end; `started` (monotonic) is when the job began."""
        done = self._resume()
        total = self.stream.total_steps
        if self.rank == 0:
            write_text(self.folder / "config.yaml", config_yaml)
            write_json(self.folder / "provenance.json", provenance())
        metrics = JsonLines(self.folder / "metrics.jsonl", keep_until_step=done) if self.rank == 0 else None
        tracker = Tracker(
            self.job.tracker if self.rank == 0 else TrackerConfig(name="none", project=""),
            self.job.run_name, self.folder, {"config": config_yaml},
        )  # fmt: skip
        acceptance: dict[str, Any] = {}
        with ProgressReport(f"train {self.job.run_name}", total, done, self.rank == 0) as progress:
            prepared = prepared_steps(self.stream, self.store, done, self.rank, self.world_size)
            for step in range(done + 1, total + 1):
                row = self._step(step, prepared)
                if self._due(step, self.job.validate_every_steps) or self._due(step, self.job.checkpoint_every_steps):
                    acceptance = self.validation.measure(self.drafter, self.job.num_draft_tokens)
                    row |= acceptance
                if metrics is not None:
                    metrics.write({"step": step, **row})
                if self._due(step, self.job.checkpoint_every_steps):
                    self._checkpoint(step, acceptance.get("acceptance_length"), config_yaml)
                if self._due(step, self.job.log_every_steps) or "acceptance_length" in row:
                    tracker.log(step, row)
                progress.update(step, _figures(row, acceptance))
        tracker.finish()
        if self.rank == 0:
            self._summarise(done, time.monotonic() - started)

    def _step(self, step: int, prepared: Iterator[PreparedStep]) -> dict[str, Any]:
        begin = time.monotonic()
        pairs = next(prepared)
        waited = time.monotonic()
        flops = sum(self.drafter.flops(batch) for batch, _ in pairs)
        clock = time.monotonic()
        result = self.engine.step(pairs)
        end = time.monotonic()
        usage = Usage(end - begin, waited - begin, end - clock, flops)
        self.usage.add(usage)
        tokens = self.stream.trained_tokens(step) - self.stream.trained_tokens(step - 1)
        return _metrics(result) | {"tokens_per_second": tokens / usage.seconds} | usage.report(self.matmul_rate)

    def _due(self, step: int, every: int) -> bool:
        return step % every == 0 or step == self.stream.total_steps

    def _resume(self) -> int:
        """Restore the newest checkpoint; returns its step (0 without one)."""
        folder = latest_checkpoint(self.folder)
        if folder is None:
            return 0
        vocabulary = self.drafter.draft_to_target_ids.clone()
        self.engine.load(folder)
        if not torch.equal(vocabulary, self.drafter.draft_to_target_ids):
            raise InputError(
                f"the corpus gives another draft vocabulary than the run in {self.folder}: its file has changed; "
                "choose another run_name=, or resume=never to start anew"
            )
        return int(folder.name.removeprefix("step-"))

    def _checkpoint(self, step: int, acceptance_length: float | None, config_yaml: str) -> None:
        manifest = Manifest(
            step=step,
            trained_tokens=self.stream.trained_tokens(step),
            target=self.target.identity(),
            acceptance_length=acceptance_length,
        )
        self.writer.write(manifest, config_yaml, self.engine.weights(), self.engine.save)

    def _summarise(self, resumed_step: int, seconds: float) -> None:
        best = (self.folder / "checkpoints" / "best").resolve()
        summary = {
            "checkpoint": str(best.relative_to(Path.cwd())) if best.is_relative_to(Path.cwd()) else str(best),
            "steps": self.stream.total_steps,
            "resumed_from_step": resumed_step,
            "trained_tokens": self.stream.trained_tokens(self.stream.total_steps),
            "trainable_parameters": self.trainable_parameters,
            "train_seconds": round(seconds, 1),
            **(self.usage.report(self.matmul_rate) if self.usage.seconds else {}),
            "next": f"python -m eval checkpoint={self.folder}",
        }
        write_json(self.folder / "summary.json", summary)
        print("\n".join(f"{key:>22}  {value}" for key, value in summary.items()))  # noqa: T201


def _metrics(result: StepResult) -> dict[str, Any]:
    return {
        "loss": result.loss,
        "loss/step": result.step_losses,
        "match/step": result.step_matches,
        "gradient_norm": result.gradient_norm,
        "learning_rate": result.learning_rate,
    }


def _figures(row: dict[str, Any], acceptance: dict[str, Any]) -> str:
    length = acceptance.get("acceptance_length")
    walked = f"  acceptance length {length:.3f}" if length is not None else ""
    return f"loss {row['loss']:.3f}  {row['tokens_per_second']:.0f} tokens/s{walked}"
