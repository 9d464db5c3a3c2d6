"""Muon for weights that ZeRO leaves whole.

Where ZeRO partitions the weights (stages 1 to 3), DeepSpeed orthogonalises a matrix in `muon_num_heads` blocks of rows;
at stage 0 its step overlooks that mark. This one does not, and is DeepSpeed's in all else. Importing it takes seconds:
DeepSpeed prepares its kernels.
"""

from collections.abc import Callable, Sequence

import torch
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
from deepspeed.runtime.zero.muon.original_muon import muon_update
from torch import Tensor
from torch.nn import Parameter

from train.drafters.base import Drafter
from train.optim import OptimConfig


class BlockMuon(MuonWithAuxAdam):  # type: ignore[misc]
    """Muon for the matrices, each in `muon_num_heads` blocks; torch's AdamW for the others."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None, step_id: int | None = None) -> None:
        """One update; `closure` and `step_id` are DeepSpeed's and unused."""
        for group in self.param_groups:
            if not group["use_muon"]:
                continue
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(weight)
                update = muon_update(
                    weight.grad,
                    state["momentum_buffer"],
                    beta=group["momentum"],
                    ns_method=group["ns_method"],
                    num_heads=getattr(weight, "muon_num_heads", None),
                )
                weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
        if self.aux_optimizer is not None:
            self.aux_optimizer.step()


def block_muon(drafter: Drafter, optim: OptimConfig) -> Callable[[Sequence[Parameter]], BlockMuon]:
    """A function from the drafter's trainable parameters to their optimizer, as DeepSpeed takes it."""
    names = {parameter: name for name, parameter in drafter.named_parameters()}

    def make(parameters: Sequence[Parameter]) -> BlockMuon:
        # DeepSpeed's own rule.
        matrices = [p for p in parameters if p.dim() >= 2 and "embed" not in names[p] and "lm_head" not in names[p]]
        others = [p for p in parameters if not any(p is matrix for matrix in matrices)]
        decay = {"weight_decay": optim.weight_decay}
        of_muon = {"lr": optim.muon_lr, "momentum": optim.momentum, "ns_method": optim.ns_method, **decay}
        of_adam = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps, **decay}
        halves = ((matrices, True, of_muon), (others, False, of_adam))
        groups = [{"params": half, "use_muon": muon, **settings} for half, muon, settings in halves if half]
        return BlockMuon(groups, adam_optimizer=torch.optim.AdamW, adam_optimizer_kwargs={"fused": True, **of_adam})

    return make
