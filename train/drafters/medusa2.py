"""Medusa-2 (arXiv:2401.10774, section 2.3.2): Medusa's heads, and a target that learns to be read by them.

    target:   low-rank adapters (LoRA, arXiv:2106.09685) on the matrices of its layers
    loss:     the heads' distillation, on the states of the target as it is now
              + preservation_weight * KL(p_before | p_now) of its own next token

**It changes the target**: what it says is no longer what the original said, and "lossless" is meant of the changed one.
Teacher of heads and target is the original. Heads that are still wrong would pull the target along: train them first
(`drafter=medusa`), then go on from there (`drafter=medusa2 drafter.init_from=RUN`). Shape letters as in
`train.drafters.base`.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from pydantic import Field
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from conf import InputError, config
from data.batch import Batch, TargetFeatures, Wants
from data.decoder import Decoder, TargetParts
from train.drafters.base import DraftLoss, Servable
from train.drafters.distillation import Teacher, chunked_distillation
from train.drafters.flops import decoder_flops
from train.drafters.medusa import Medusa, MedusaConfig
from train.drafters.rows import ChainLabels


@config
class Medusa2Config(MedusaConfig):
    """Values: conf/drafter/medusa2.yaml."""

    lora_rank: int = Field(ge=1)
    """Rank of the target's adapters."""
    lora_alpha: float = Field(gt=0)
    """They are scaled by lora_alpha / lora_rank."""
    preservation_weight: float = Field(ge=0)
    """What it costs the target to differ from what it was."""
    init_seed: int
    """Of the adapters; they change nothing at the start."""

    def families(self) -> tuple[str, ...]:
        """See DrafterConfig.families: Medusa's heads, whose target is unchanged."""
        return (self.name, "medusa")

    def build(self, target: TargetParts, draft_to_target_ids: Tensor) -> "Medusa2":
        """Make untrained heads and adapters; see DrafterConfig.build."""
        return Medusa2(self, target, draft_to_target_ids)


class Medusa2(Medusa):
    """The heads and the adapters."""

    settings: Medusa2Config
    stack = "target"

    def __init__(self, settings: Medusa2Config, target: TargetParts, draft_to_target_ids: Tensor) -> None:
        super().__init__(settings, target, draft_to_target_ids)
        adapters = LoraConfig(r=settings.lora_rank, lora_alpha=settings.lora_alpha, target_modules="all-linear")
        model = twin(target.decoder.model)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.init_seed)
            inject_adapter_in_model(adapters, model)
        self._changed = Decoder(model)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        for parameter in trained.values():
            parameter.data = parameter.data.float()  # peft gives them the target's dtype
        # The very parameters that the model reads, under names without dots.
        self.adapters = nn.ParameterDict({name.replace(".", "/"): p for name, p in trained.items()})

    def changed_target(self) -> Any:
        """See Drafter.changed_target."""
        return self._changed.model

    # --- training ----------------------------------------------------------------------------------------------------

    def states(self, batch: Batch, features: TargetFeatures) -> Tensor:
        """The changed target's, whatever target made `features`; see Medusa.states."""
        if not all(p.numel() for p in self.adapters.values()):
            raise InputError("drafter=medusa2: ZeRO-3 scatters the target's adapters; choose another deepspeed=")
        last = self._changed.packed(batch, Wants(aux_layers=(), last_hidden_state=True)).last_hidden_state
        assert last is not None  # asked for
        return last.flatten(0, 1).to(next(self.blocks.parameters()).dtype)

    def loss(self, batch: Batch, features: TargetFeatures) -> DraftLoss:
        """Heads and preservation; see Drafter.loss."""
        states = self.states(batch, features)
        heads = self.taught(states, batch, features)
        preserved = self._preservation(states, batch, features)
        return replace(heads, loss=heads.loss + self.settings.preservation_weight * preserved)

    def _preservation(self, states: Tensor, batch: Batch, features: TargetFeatures) -> Tensor:
        """KL(before | now) over the whole vocabulary, for every token that the target generated."""
        assert features.last_hidden_state is not None  # asked for in `wants`
        labels = generated(batch)
        everything = torch.arange(self.target_vocab_size, device=states.device)
        before = Teacher(
            hidden=features.last_hidden_state.flatten(0, 1),
            lm_head=self.target_head,
            draft_head=self.target_head,
            draft_to_target_ids=everything,
            token_ids=batch.input_ids.flatten(),
        )
        now = states.index_select(0, labels.label - 1).to(self.target_head.dtype)
        chosen = replace(self.loss_settings(1, 1.0, 1.0), kind="kl", mask_out_of_vocab=False)
        weights = batch.token_weights.flatten()
        total, _, _ = chunked_distillation([now], [self.target_head], before, labels, weights, chosen)
        return total

    def flops(self, batch: Batch) -> int:
        """See Drafter.flops."""
        reading = decoder_flops(
            self._changed.layers, self.changed_target().config.get_text_config(), batch.position_ids
        )
        return super().flops(batch) + reading + 6 * len(generated(batch).label) * self.target_head.numel()

    def translate(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
        """Heads as of Medusa, with adapters that change nothing; see Drafter.translate."""
        return {**self.adapters.state_dict(prefix="adapters."), **super().translate(tensors, config)}

    def to_serving(self) -> Servable:
        """Medusa's heads, and the target's matrices with the adapters merged into them; see Drafter.to_serving."""
        heads = super().to_serving()
        kept = {name: tensor for name, tensor in heads.tensors.items() if not name.startswith("adapters.")}
        merged = copy.deepcopy(self._changed.model)
        named = {}
        for name, module in merged.named_modules():
            if isinstance(module, BaseTunerLayer):
                module.merge()
                named[f"{name}.weight"] = module.get_base_layer().weight.detach()
        return replace(heads, tensors=kept, target_tensors=revert_weight_conversion(merged, named))


def generated(batch: Batch) -> ChainLabels:
    """Every token of the answers, the first included: its teacher is the last row of the prompt."""
    label = torch.nonzero((batch.loss_mask & (batch.position_ids > 0)).flatten()).squeeze(1)
    return ChainLabels(label=label, taught=(torch.arange(len(label), device=label.device),))


def twin(model: Any) -> Any:
    """A model of its own that shares every weight: it can be changed without changing `model`."""
    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    other = copy.deepcopy(model, memo=shared)
    for module in other.modules():
        module.__dict__.pop("forward", None)  # a compiled one would run the original's layer
    return other
