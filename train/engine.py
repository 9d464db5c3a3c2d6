"""DeepSpeed around a drafter: the only module that knows about ranks, gradients and optimizer state."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.utils import ZeRORuntimeException
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor

from conf import InputError, config
from data.batch import Batch, TargetFeatures
from train.drafters.base import Drafter, DraftLoss
from train.optim import OptimConfig, adamw_8bit, deepspeed_optimizer, parameter_groups, schedule_factory
from train.state_files import load_state, save_state

Precision = Literal["float32", "bfloat16"]
"""bfloat16: float32 weights and optimizer, bf16 matrix products (autocast)."""


@config
class DeepSpeedConfig:
    """Values: conf/deepspeed/*.yaml, in DeepSpeed's own keys."""

    zero_optimization: dict[str, Any]
    """DeepSpeed's section of that name."""
    zero_force_ds_cpu_optimizer: bool
    """Offloaded optimizer states need DeepSpeed's compiled CPU Adam; False accepts torch's."""


@dataclass(frozen=True)
class StepResult:
    """One optimizer step, summed over micro-batches and ranks."""

    loss: float
    step_losses: list[float]
    step_matches: list[float]
    gradient_norm: float
    """Before clipping. Muon under ZeRO (stages 1 to 3): of its orthogonalised update, all that DeepSpeed keeps."""
    learning_rate: float


def init_distributed() -> tuple[int, int]:
    """Join the process group that torchrun or the deepspeed launcher describes, or make one of a single rank.

    Returns:
        rank, world size.
    """
    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update(alone)
    os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if not torch.cuda.is_available():
        # A compiler would run for a minute at first use: gloo reduces well enough without this extension.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not dist.is_initialized():
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    return dist.get_rank(), dist.get_world_size()


def leave_distributed() -> None:
    """Leave the process group once every rank has arrived here.

    Its threads would otherwise outlive the interpreter: one that still frees the last collective's tensors while Python
    shuts down aborts the process (seen on a rank that had nothing left to do after the last barrier).
    """
    dist.barrier()
    dist.destroy_process_group()


class Engine:
    """Trains one drafter. Every rank calls every method."""

    def __init__(
        self,
        drafter: Drafter,
        optim: OptimConfig,
        zero: DeepSpeedConfig,
        precision: Precision,
        accumulation_steps: int,
        total_steps: int,
    ) -> None:
        self.drafter = drafter
        self.accumulation_steps = accumulation_steps
        self.world_size = dist.get_world_size()
        settings: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": accumulation_steps,
            "gradient_clipping": optim.clip,
            "zero_optimization": zero.zero_optimization,
            "zero_force_ds_cpu_optimizer": zero.zero_force_ds_cpu_optimizer,
            "torch_autocast": {"enabled": precision == "bfloat16", "dtype": "bfloat16"},
            "steps_per_print": 2**31,
        }
        if optim.name == "muon":
            # Under ZeRO DeepSpeed would clip Muon's orthogonalised update, not the gradient; Muon needs no clipping:
            # its update does not depend on the gradient's size. With ZeRO-3 it refuses to work on scattered gradients.
            settings["gradient_clipping"] = 0.0
            settings["zero_optimization"] = {"reduce_scatter": False, **zero.zero_optimization}
        ours = None
        if optim.name == "adamw_8bit":
            ours = adamw_8bit(optim)
            settings["zero_allow_untested_optimizer"] = True
        else:
            settings["optimizer"] = deepspeed_optimizer(optim)
        self._engine, _, _, _ = deepspeed.initialize(
            model=drafter,
            model_parameters=parameter_groups(drafter, optim),
            optimizer=ours,
            config=settings,
            lr_scheduler=schedule_factory(optim, total_steps),
        )
        self._engine.checkpoint_engine = _SafetensorsCheckpoints()
        # DeepSpeed compiles Muon. On a CPU its few matrix products run as fast eagerly, without a minute's wait.
        self._optimizer_stance = "default" if torch.cuda.is_available() else "force_eager"

    def step(self, micro_batches: Sequence[tuple[Batch, TargetFeatures]]) -> StepResult:
        """One optimizer step over this rank's micro-batches of a global batch.

        The global loss is the *sum* of all micro-batches' losses (`token_weights` carry the normalisation), so the
        averages that DeepSpeed takes over accumulation and ranks are undone.
        """
        if len(micro_batches) != self.accumulation_steps:
            raise ValueError(f"expected {self.accumulation_steps} micro-batches, got {len(micro_batches)}")
        sums: Tensor | None = None
        learning_rate = float(self._engine.get_lr()[-1])
        self._engine.train()
        for batch, features in micro_batches:
            result = DraftLoss(*self._engine(batch, features))
            with torch.compiler.set_stance(self._optimizer_stance):  # ZeRO makes Muon's update at the end of backward
                self._engine.backward(result.loss * self.world_size * self.accumulation_steps)
                gradient_norm = self._unpartitioned_gradient_norm()
                self._engine.step()
            row = torch.cat([result.loss.detach().reshape(1).float(), result.step_losses, result.step_matches])
            sums = row if sums is None else sums + row
        assert sums is not None  # accumulation_steps >= 1
        dist.all_reduce(sums)
        steps = (len(sums) - 1) // 2
        values = sums.tolist()
        return StepResult(
            loss=values[0],
            step_losses=values[1 : steps + 1],
            step_matches=values[steps + 1 :],
            gradient_norm=float(gradient_norm if gradient_norm is not None else self._engine.get_global_grad_norm()),
            learning_rate=learning_rate,
        )

    def _unpartitioned_gradient_norm(self) -> Tensor | None:
        """Norm before clipping where every rank holds all gradients; None under ZeRO, which reports it after a step."""
        if self._engine.zero_optimization_stage() > 0:
            return None
        gradients = [parameter.grad for parameter in self.drafter.parameters() if parameter.grad is not None]
        return torch.nn.utils.get_total_norm(gradients)

    def weights(self) -> dict[str, Tensor]:
        """The drafter's full state on the CPU (gathered from all ranks under ZeRO-3)."""
        with deepspeed.zero.GatheredParameters(list(self.drafter.parameters())):
            return {name: tensor.detach().cpu().clone() for name, tensor in self.drafter.state_dict().items()}

    def save(self, folder: Path) -> None:
        """Write optimizer, schedule and (partitioned) weights below `folder`, one file per rank and part."""
        self._engine.save_checkpoint(str(folder), tag="engine", save_latest=False)
        if dist.get_rank() == 0:
            for script in folder.glob("zero_to_*.py"):  # DeepSpeed leaves its converters; a checkpoint holds no code
                script.unlink()

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote; the same number of ranks and ZeRO stage are needed.

        Raises:
            InputError: if a file is missing or damaged.
        """
        try:
            path, _ = self._engine.load_checkpoint(str(folder), tag="engine")
        except (AssertionError, ZeRORuntimeException) as error:
            raise InputError(
                f"cannot resume from {folder}: {str(error) or 'files are missing from engine/'}"
            ) from error
        if path is None:
            raise InputError(f"cannot resume from {folder}: files are missing from engine/")

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier()


class _SafetensorsCheckpoints(CheckpointEngine):  # type: ignore[misc]
    """DeepSpeed's checkpoint files as safetensors instead of pickles."""

    def create(self, info: CheckpointCommitInfo) -> None:
        """Nothing to prepare."""

    def save(self, state_dict: Any, path: str) -> None:
        """Write one of DeepSpeed's state dicts."""
        plain = _replace(state_dict, LossScaler, lambda scaler: ("LossScaler", scaler.cur_scale))
        # Where ZeRO cut its flat buffers: informative only, loading cuts them anew.
        save_state(_replace(plain, fragment_address, lambda piece: [piece.numel, piece.start]), Path(path))

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read one of DeepSpeed's state dicts."""
        state = load_state(Path(path))
        return _replace(state, tuple, lambda pair: LossScaler(pair[1]) if pair[:1] == ("LossScaler",) else pair)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Naming the finished checkpoint is the caller's part (train/checkpoint.py)."""
        return True


def _replace(node: Any, kind: type, convert: Any) -> Any:
    """`node` with every instance of `kind` inside dicts and lists converted."""
    if isinstance(node, kind):
        return convert(node)
    if isinstance(node, dict):
        return type(node)((key, _replace(entry, kind, convert)) for key, entry in node.items())
    if isinstance(node, list):
        return [_replace(entry, kind, convert) for entry in node]
    return node
