"""EAGLE-3 (arXiv:2503.01840) and 3.1: one decoder layer over fused target features, trained by training-time test.

    f_t = fc([a_t^low; a_t^mid; a_t^high])                      fc_norm (3.1): RMSNorm each of the three first
    step k, row t:  e = RMSNorm_in(emb(x_{t+1+k})),  r = RMSNorm_hid(g),  g = f_t (k = 0), else the step before's output
    layer:          y = g + Attention([e; r]),  y = y + MLP(RMSNorm_post(y))   norm_before_residual: r for g
    logits:         lm_head(RMSNorm(y));  next step's g = y            norm_output (3.1): RMSNorm(y)

Which row reads what is in `train.drafters.rows`. Shape letters as in `train.drafters.base`; R = flattened rows B * T.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from conf import InputError, config
from data.batch import TargetFeatures, Wants
from data.decoder import TargetParts
from train.drafters.base import Servable
from train.drafters.draft_layer import Attend, EagleLayer, compile_layer, default_aux_layers, start_from_target
from train.drafters.fed_back import FedBackConfig, FedBackDrafter
from train.drafters.flops import linear_flops
from train.drafters.foreign import renamed, require_settings, require_targets_embedding
from train.drafters.layers import RMSNorm, Rotary


@config
class Eagle3Config(FedBackConfig):
    """Values: conf/drafter/eagle3.yaml."""

    aux_layers: tuple[int, ...] | None
    """Indices into the target's `hidden_states` (i = the state entering layer i), ascending, each in 1..n-1;
    None means (2, n // 2, n - 3) for n layers."""
    fc_norm: bool
    """EAGLE-3.1: normalise each auxiliary state before fc."""
    norm_output: bool
    """EAGLE-3.1: feed the normalised output to the next step."""
    norm_before_residual: bool
    """Start the residual stream from the normalised feature. vLLM and llama.cpp only: not portable."""
    qk_norm: bool
    """Normalise queries and keys per head (Qwen3's kind of layer). vLLM only: not portable."""
    train_lm_head: bool
    """Train the LM head (it starts as the target's rows); False keeps these frozen."""
    init_layer: int | None
    """Copy attention and feed-forward of this target layer (negative counts from the end); None starts at random."""
    init_seed: int
    """Of the random parts."""

    def build(self, target: TargetParts, draft_to_target_ids: Tensor) -> "Eagle3":
        """Make the untrained head; see DrafterConfig.build.

        Raises:
            ValueError: if a layer index is outside the target.
        """
        return Eagle3(self, target, draft_to_target_ids)


def _stated_layers(facts: Mapping[str, Any], nested: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The auxiliary layers that config.json names, as states that enter a layer: so counts the list at its top (vLLM,
    speculators); the nested one (EAGLE, SpecForge, ModelOpt, SGLang) counts the layers whose output is meant."""
    key = "eagle_aux_hidden_state_layer_ids"
    entering, leaving = facts.get(key), nested.get(key)
    shifted = None if leaving is None else [layer + 1 for layer in leaving]
    if entering is not None and shifted is not None and list(entering) != shifted:
        raise InputError(
            f"the head names its layers twice, and differently: {key} {entering} at the top, {leaving} in eagle_config "
            "(the latter counts from one less)"
        )
    stated = entering if entering is not None else shifted
    return default_aux_layers(num_layers) if stated is None else tuple(stated)


class Eagle3(FedBackDrafter):
    """The head. `fc`, `midlayer`, `norm`, `lm_head` are trained; the embedding is the target's own."""

    settings: Eagle3Config

    def __init__(self, settings: Eagle3Config, target: TargetParts, draft_to_target_ids: Tensor) -> None:
        super().__init__(settings, target, draft_to_target_ids)
        shape, width = self.shape, self.shape.hidden_size
        layers = settings.aux_layers
        if layers is None:
            layers = default_aux_layers(shape.num_hidden_layers)
        if (
            not layers
            or list(layers) != sorted(set(layers))
            or not all(1 <= i < shape.num_hidden_layers for i in layers)
        ):
            raise ValueError(
                f"drafter.aux_layers {list(layers)}: expected ascending layers between 1 and "
                f"{shape.num_hidden_layers - 1} (engines cannot capture others)"
            )
        self.wants = Wants(aux_layers=layers, last_hidden_state=True)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.init_seed)
            self.fc_norm = nn.ModuleList(
                RMSNorm(width, shape.rms_norm_eps) for _ in range(len(layers) if settings.fc_norm else 0)
            )
            self.fc = nn.Linear(len(layers) * width, width, bias=False)
            self.midlayer = EagleLayer(shape, settings.norm_before_residual, settings.qk_norm)
            self.norm = RMSNorm(width, shape.rms_norm_eps)
            self.lm_head = nn.Linear(width, len(draft_to_target_ids), bias=False)
        self.rotary = Rotary(shape)
        self._initialise(target)
        if settings.compile:
            compile_layer(self.midlayer)

    @torch.no_grad()
    def _initialise(self, target: TargetParts) -> None:
        self.lm_head.weight.copy_(self.teacher_rows)
        self.lm_head.requires_grad_(self.settings.train_lm_head)
        self.norm.weight.copy_(target.final_norm)
        if self.settings.init_layer is not None:
            start_from_target(self.midlayer, self.fc, target.decoder.layers, self.settings.init_layer)

    # --- what one row computes, in training and decoding -------------------------------------------------------------

    @property
    def draft_head(self) -> Tensor:
        """See FedBackDrafter.draft_head."""
        return self.lm_head.weight

    def fuse(self, features: TargetFeatures) -> Tensor:
        """(B, T, A * D) auxiliary states -> (R, D) features."""
        states = self.aux_hidden(features)
        if self.fc_norm:
            parts = states.chunk(len(self.fc_norm), dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        fused: Tensor = self.fc(states)
        return fused

    def layer(
        self, ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, queries: Tensor | None = None
    ) -> Tensor:
        """See FedBackDrafter.layer."""
        embeds = self.embed(ids, self.fc.weight)
        output: Tensor = self.midlayer(embeds, hidden, self.rotary.table(positions), attend, queries)
        return output

    def fed_back(self, stream: Tensor) -> Tensor:
        """See FedBackDrafter.fed_back."""
        return self.normed(stream) if self.settings.norm_output else stream

    def normed(self, stream: Tensor) -> Tensor:
        """See FedBackDrafter.normed."""
        output: Tensor = self.norm(stream)
        return output

    def logits(self, stream: Tensor) -> Tensor:
        """See FedBackDrafter.logits; called as a module, which is where ZeRO-3 gathers its weight."""
        output: Tensor = self.lm_head(self.norm(stream))
        return output

    def layer_flops(self, everywhere: int, key_rows: int, query_rows: int, pairs: int) -> int:
        """See FedBackDrafter.layer_flops."""
        fused = linear_flops(self.fc, everywhere, input_gradient=False)
        return fused + self.midlayer.flops(key_rows, query_rows, pairs)

    def translate(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
        """Heads of EAGLE, SpecForge, ModelOpt and speculators; see Drafter.translate."""
        require_targets_embedding(tensors, self.embed_tokens)
        num_layers = self.shape.num_hidden_layers
        facts = dict(config)
        nested = facts.get("eagle_config") or {}
        of_speculators = "speculators_model_type" in facts
        if facts.get("norm_before_fc") or nested.get("norm_before_fc") or "input_norm.weight" in tensors:
            raise InputError("the head normalises all auxiliary states as one (norm_before_fc), which ours cannot")
        require_settings(
            {
                "aux_layers": _stated_layers(facts, nested, num_layers),
                "norm_before_residual": facts.get("norm_before_residual", of_speculators),
                "qk_norm": any(name.endswith("self_attn.q_norm.weight") for name in tensors),
                "fc_norm": facts.get("fc_norm", facts.get("use_aux_norm", False)),
                "norm_output": facts.get("norm_output", nested.get("return_hidden_post_norm", False)),
            },
            {**vars(self.settings), "aux_layers": self.wants.aux_layers},
        )
        found = renamed(tensors, [(r"layers\.0\.(.*)", r"midlayer.\1")], ["embed_tokens.weight", r"verifier_.*"])
        if "lm_head.weight" not in found and len(self.draft_to_target_ids) == self.target_vocab_size:
            found["lm_head.weight"] = self.target_head  # engines share it
        return found

    def to_serving(self) -> Servable:
        """Tensors and facts of serving.md's EAGLE-3 contract; see Drafter.to_serving."""
        return self.served(
            "eagle3",
            {
                "aux_layers": list(self.wants.aux_layers),
                "fc_norm": self.settings.fc_norm,
                "norm_output": self.settings.norm_output,
                "norm_before_residual": self.settings.norm_before_residual,
                "qk_norm": self.settings.qk_norm,
                "head_dim": self.midlayer.head_dim,
            },
        )
