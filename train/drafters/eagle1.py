"""EAGLE-1 (arXiv:2401.15077) and HASS (arXiv:2408.15766): one layer that guesses the target's next state.

    step k, row t:  z = fc [emb(x_{t+1+k}); g]
                    g = the target's state at t after its final norm (k = 0), else the step before's output, detached
    layer:          y = a Llama layer of z, without an input norm
    logits:         the target's LM head(y);  next step's g = y
    loss:           feature_weight * SmoothL1(y, the target's state at t+1+k) + distillation_weight * distillation

EAGLE-1 has one step; HASS trains several, each on what decoding will read. Embedding and LM head are the target's,
frozen. Which row reads what is in `train.drafters.rows`. Shape letters as in `train.drafters.base`; R = flattened rows.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from conf import InputError, config
from data.batch import Batch, TargetFeatures, Wants
from data.decoder import TargetParts, norm_scale
from train.drafters.base import DraftLoss, Servable
from train.drafters.draft_layer import Attend, PlainLayer, compile_layer, silence, start_from_target
from train.drafters.fed_back import FedBackConfig, FedBackDrafter
from train.drafters.flops import linear_flops
from train.drafters.foreign import renamed, require_targets_embedding
from train.drafters.layers import Rotary, product_dtype
from train.drafters.rows import ChainLabels


@config
class Eagle1Config(FedBackConfig):
    """Values: conf/drafter/eagle1.yaml and hass.yaml."""

    feature_weight: float = Field(ge=0)
    """Weight of the regression of the target's states."""
    distillation_weight: float = Field(ge=0)
    """Weight of the loss over the vocabulary."""
    init_layer: int | None
    """Copy this target layer (negative counts from the end); None starts at random."""
    init_seed: int
    """Of the random parts."""

    def build(self, target: TargetParts, draft_to_target_ids: Tensor) -> "Eagle1":
        """Make the untrained head; see DrafterConfig.build."""
        return Eagle1(self, target, draft_to_target_ids)


class Eagle1(FedBackDrafter):
    """The head: `fc` and one layer."""

    settings: Eagle1Config

    def __init__(self, settings: Eagle1Config, target: TargetParts, draft_to_target_ids: Tensor) -> None:
        super().__init__(settings, target, draft_to_target_ids)
        self.wants = Wants(aux_layers=(), last_hidden_state=True)
        width = self.shape.hidden_size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.init_seed)
            self.fc = nn.Linear(2 * width, width, bias=False)
            self.decoder_layer = PlainLayer(self.shape, input_norm=False)
        self.rotary = Rotary(self.shape)
        if settings.init_layer is not None:
            start_from_target(self.decoder_layer, self.fc, target.decoder.layers, settings.init_layer)
            self._start_silent(target, settings.init_layer)
        if settings.compile:
            compile_layer(self.decoder_layer)

    @torch.no_grad()
    def _start_silent(self, target: TargetParts, index: int) -> None:
        """Fit the copied layer to what it reads: without this it starts far from anything useful, and learns little.

        The target's layer reads x / rms(x) * w, with its input norm's w; this one the state after the target's final
        norm, x / rms(x) * f: so w / f goes into the columns of q, k and v. And it writes nothing at first: its output
        would be added to a normed state, the target's is made for one that is not.
        """
        source: Any = target.decoder.layers[index]
        ratio = norm_scale(source.input_layernorm).float() / target.final_norm.float()
        layer: Any = self.decoder_layer
        for name in ("q_proj", "k_proj", "v_proj"):
            layer.self_attn[name].weight.mul_(ratio.to(layer.self_attn[name].weight.device))
        silence(layer)

    def taught(
        self, streams: Sequence[Tensor], labels: ChainLabels, batch: Batch, features: TargetFeatures
    ) -> DraftLoss:
        """Regression and distillation; see FedBackDrafter.taught."""
        assert features.last_hidden_state is not None  # asked for in `wants`
        distilled = super().taught(streams, labels, batch, features)
        states, weights = features.last_hidden_state.flatten(0, 1), batch.token_weights.flatten()
        regression = distilled.loss.new_zeros(())
        for step, stream in enumerate(streams):
            label = labels.label[labels.taught[step]]
            error = nn.functional.smooth_l1_loss(stream.float(), states[label - 1].float(), reduction="none").mean(-1)
            scale = self.settings.step_loss_decay**step / self.settings.row_keep_ratio**step
            regression = regression + scale * (error * weights[label]).sum()
        total = self.settings.feature_weight * regression + self.settings.distillation_weight * distilled.loss
        return DraftLoss(loss=total, step_losses=distilled.step_losses, step_matches=distilled.step_matches)

    def layer(
        self, ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, queries: Tensor | None = None
    ) -> Tensor:
        """See FedBackDrafter.layer."""
        dtype = product_dtype(hidden)
        joined = self.fc(torch.cat([self.embed(ids, hidden).to(dtype), hidden.to(dtype)], dim=-1))
        output: Tensor = self.decoder_layer(joined, self.rotary.table(positions), attend, queries)
        return output

    def fed_back(self, stream: Tensor) -> Tensor:
        """See FedBackDrafter.fed_back."""
        return stream.detach()

    def normed(self, stream: Tensor) -> Tensor:
        """The stream itself: it stands for the target's state after its final norm."""
        return stream

    def layer_flops(self, everywhere: int, key_rows: int, query_rows: int, pairs: int) -> int:
        """See FedBackDrafter.layer_flops. What is fed back is detached: fc needs no gradient of its input."""
        fused = linear_flops(self.fc, key_rows, input_gradient=False)
        return fused + self.decoder_layer.flops(key_rows, query_rows, pairs)

    def translate(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
        """Heads of EAGLE and HASS, whose fc may have a bias of zeros; see Drafter.translate."""
        require_targets_embedding(tensors, self.embed_tokens)
        if "fc.bias" in tensors and bool(tensors["fc.bias"].any()):
            raise InputError("the head's fc has a bias, which ours (and vLLM's) has not")
        return renamed(
            tensors, [(r"layers\.0\.(.*)", r"decoder_layer.\1")], ["embed_tokens.weight", "fc.bias", "lm_head.weight"]
        )

    def to_serving(self) -> Servable:
        """See Drafter.to_serving."""
        return self.served("eagle1", {"head_dim": self.decoder_layer.head_dim})
