"""Optimizer and learning-rate schedule, in DeepSpeed's and transformers' own terms."""

from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from conf import InputError, config

LORA = "lora_"
"""What peft puts before the names of LoRA's matrices. Not asked of peft: its import takes every run seconds."""


@config
class OptimConfig:
    """Values: conf/optim/*.yaml."""

    name: Literal["adamw", "adamw_8bit", "muon"]
    """adamw_8bit: bitsandbytes' AdamW, whose two states take a byte per element and not four.
    muon: DeepSpeed's Muon for the matrices, AdamW for norms and LM head."""
    lr: float = Field(gt=0)
    """Peak learning rate of AdamW's parameters."""
    muon_lr: float = Field(gt=0)
    """Peak learning rate of Muon's matrices; unused by adamw."""
    adapter_lr: float = Field(gt=0)
    """Peak learning rate of LoRA's matrices: they change a trained model, which the others' rates would destroy."""
    momentum: float = Field(ge=0, lt=1)
    """Of Muon."""
    ns_method: Literal["standard", "gram"]
    """Muon's orthogonalisation: standard computes in bf16 (fastest on a CPU), gram in fp16, else float32."""
    betas: tuple[float, float]
    eps: float = Field(gt=0)
    weight_decay: float = Field(ge=0)
    schedule: Literal["cosine", "wsd", "constant"]
    """wsd: warm-up, stable, then linear decay over the last `decay_ratio` of the steps."""
    warmup_ratio: float = Field(ge=0, le=1)
    """Share of all steps with a linearly rising learning rate."""
    decay_ratio: float = Field(ge=0, le=1)
    """Only for wsd."""
    clip: float = Field(ge=0)
    """Largest norm of the global gradient; 0 does not clip. Unused by muon, whose update has a norm of its own."""


def parameter_groups(drafter: Module, optim: OptimConfig) -> list[dict[str, Any]]:
    """Everything that is trained, as torch's optimizers take it: LoRA's matrices have a rate of their own."""
    trained = {name: parameter for name, parameter in drafter.named_parameters() if parameter.requires_grad}
    adapters = [parameter for name, parameter in trained.items() if LORA in name]
    others = [parameter for name, parameter in trained.items() if LORA not in name]
    groups: list[dict[str, Any]] = [{"params": others}, {"params": adapters, "lr": optim.adapter_lr}]
    return [group for group in groups if group["params"]]


def adamw_8bit(optim: OptimConfig) -> Callable[[list[dict[str, Any]]], Optimizer]:
    """A function from parameters to bitsandbytes' 8-bit AdamW.

    Raises:
        InputError: if bitsandbytes is not installed.
    """
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise InputError("optim=adamw_8bit needs bitsandbytes: pip install 'outrider[8bit]'") from error

    def make(groups: list[dict[str, Any]]) -> Optimizer:
        optimizer: Optimizer = AdamW8bit(
            groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay
        )
        return optimizer

    return make


def deepspeed_optimizer(optim: OptimConfig) -> dict[str, Any]:
    """The `optimizer` section of a DeepSpeed config, for those that DeepSpeed makes itself."""
    # torch_adam: DeepSpeed's own AdamW would be compiled at first use.
    adam = {"betas": list(optim.betas), "eps": optim.eps, "weight_decay": optim.weight_decay, "torch_adam": True}
    if optim.name == "adamw":  # fused: one pass over memory
        return {"type": "AdamW", "params": {"lr": optim.lr, "fused": True, **adam}}
    return {
        "type": "Muon",
        "params": {
            "lr": optim.lr,
            "muon_lr": optim.muon_lr,
            "adam_lr": optim.lr,
            "momentum": optim.momentum,
            "ns_method": optim.ns_method,
            **adam,
        },
    }


def schedule_factory(optim: OptimConfig, total_steps: int) -> Callable[[Optimizer], LRScheduler]:
    """A function from optimizer to its schedule over `total_steps` optimizer steps."""
    warmup = round(optim.warmup_ratio * total_steps)
    names = {"cosine": "cosine", "wsd": "warmup_stable_decay", "constant": "constant_with_warmup"}
    extra = {}
    if optim.schedule == "wsd":
        decay = round(optim.decay_ratio * total_steps)
        extra = {"num_decay_steps": decay, "decay_type": "linear", "warmup_type": "linear"}

    def make(optimizer: Optimizer) -> LRScheduler:
        scheduler: LRScheduler = get_scheduler(
            names[optim.schedule], optimizer, warmup, total_steps, scheduler_specific_kwargs=extra
        )
        return scheduler

    return make
