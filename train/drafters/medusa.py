"""Medusa (arXiv:2401.10774): residual blocks over the target's last hidden state, one head per drafted position.

    head k, row t:  h = the target's state at t after its final norm
                    h = h + SiLU(W_kl h + b_kl)  for l = 1..num_layers
    logits:         the target's LM head (shared, frozen), or one of each head's own, which starts as the target's

W and b start at zero, so an untrained head says what the target said of the next token. A head sees no drafted token:
the distributions of all positions are known at once. Shape letters as in `train.drafters.base`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from conf import InputError, config
from data.batch import Batch, TargetFeatures, Wants, last_rows
from data.decoder import TargetParts
from train.drafters.base import DraftLoss, DraftState, Servable
from train.drafters.distilled import DistilledDrafter, SteppedConfig
from train.drafters.flops import linear_flops, product_flops
from train.drafters.foreign import renamed
from train.drafters.rows import chain_labels


@config
class MedusaConfig(SteppedConfig):
    """Values: conf/drafter/medusa.yaml."""

    num_heads: int = Field(ge=1)
    """Heads, and the longest chain that can be drafted."""
    num_layers: int = Field(ge=1)
    """Residual blocks per head."""
    own_lm_heads: bool
    """Train an LM head for each head; False shares the target's, frozen."""

    def build(self, target: TargetParts, draft_to_target_ids: Tensor) -> "Medusa":
        """Make the untrained heads; see DrafterConfig.build."""
        return Medusa(self, target, draft_to_target_ids)


class ResidualBlock(nn.Module):
    """h + SiLU(W h + b), the identity at the start."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        return hidden + nn.functional.silu(self.linear(hidden))


@dataclass
class MedusaState(DraftState):
    """Decoding state of B sequences."""

    hidden: Tensor | None = None
    """(B, D): the target's state at the last committed row."""

    def keep(self, sequences: Tensor) -> None:
        """See DraftState.keep."""
        self.hidden = None if self.hidden is None else self.hidden[sequences]


class Medusa(DistilledDrafter):
    """The heads. Everything but `blocks` and `lm_heads` is the target's."""

    settings: MedusaConfig

    def __init__(self, settings: MedusaConfig, target: TargetParts, draft_to_target_ids: Tensor) -> None:
        super().__init__(settings, target, draft_to_target_ids)
        self.wants = Wants(aux_layers=(), last_hidden_state=True)
        self.max_draft_tokens = settings.num_heads
        width = self.shape.hidden_size
        # Every block has weights of its own: [block] * num_layers would tie them.
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(width) for _ in range(settings.num_layers)))
            for _ in range(settings.num_heads)
        )
        self.lm_heads = nn.ModuleList(
            nn.Linear(width, len(draft_to_target_ids), bias=False)
            for _ in range(settings.num_heads if settings.own_lm_heads else 0)
        )
        with torch.no_grad():
            for weight in self.lm_heads.parameters():
                weight.copy_(self.teacher_rows)

    # --- training ----------------------------------------------------------------------------------------------------

    def states(self, batch: Batch, features: TargetFeatures) -> Tensor:
        """(B * T, D): what the heads read at each row of packed text."""
        return self.last_hidden(features)

    def loss(self, batch: Batch, features: TargetFeatures) -> DraftLoss:
        """Distillation over all heads; see Drafter.loss."""
        return self.taught(self.states(batch, features), batch, features)

    def taught(self, states: Tensor, batch: Batch, features: TargetFeatures) -> DraftLoss:
        """The loss of heads that read these `states`."""
        labels = chain_labels(batch, self.settings.num_heads, self.settings.row_keep_ratio)
        hidden = [block(states[labels.rows(head)]) for head, block in enumerate(self.blocks)]
        decay, keep = self.settings.step_loss_decay, self.settings.row_keep_ratio
        return self.distil(hidden, self._head_weights(), labels, batch, features, decay, keep)

    def flops(self, batch: Batch) -> int:
        """See Drafter.flops."""
        labels = chain_labels(batch, self.settings.num_heads, self.settings.row_keep_ratio)
        total = self.teacher_flops(labels)
        heads = self._head_weights()
        for index, block in enumerate(self.blocks):
            rows = len(labels.taught[index])
            layers = [part for part in block.modules() if isinstance(part, nn.Linear)]
            total += sum(linear_flops(layer, rows, input_gradient=depth > 0) for depth, layer in enumerate(layers))
            total += product_flops(heads[min(index, len(heads) - 1)], rows)
        return total

    def _head_weights(self) -> list[Tensor]:
        """(Vd, D) for each head, or one for all."""
        return [head.get_parameter("weight") for head in self.lm_heads] or [self.teacher_rows]

    @torch.no_grad()
    def greedy_drafts(self, batch: Batch, features: TargetFeatures, num_draft_tokens: int) -> Tensor:
        """See Drafter.greedy_drafts."""
        states = self.states(batch, features)
        drafts = [
            self.draft_to_target_ids[self._logits(states, head).argmax(dim=-1)] for head in range(num_draft_tokens)
        ]
        return torch.stack(drafts, dim=-1).view(*batch.input_ids.shape, num_draft_tokens)

    # --- decoding ----------------------------------------------------------------------------------------------------

    def start(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> MedusaState:
        """An empty state; see Proposer.start."""
        return MedusaState()

    def observe(self, state: MedusaState, features: TargetFeatures, next_ids: Tensor, counts: Tensor) -> None:
        """Keep the last committed row; see Proposer.observe."""
        state.hidden = last_rows(self.last_hidden(features).view(*next_ids.shape, -1), counts)

    def first_logits(self, state: MedusaState) -> Tensor:
        """(B, Vd); see SerialDrafter.first_logits."""
        if state.hidden is None:
            raise ValueError("propose() needs a committed row to draft from: call observe() first")
        return self._logits(state.hidden, 0)

    def extend(self, state: MedusaState, tokens: Tensor, parents: Tensor, depth: int) -> Tensor:
        """(B, W, Vd): the same for all nodes of a depth; see SerialDrafter.extend."""
        assert state.hidden is not None  # first_logits came before
        return self._logits(state.hidden, depth)[:, None].expand(-1, tokens.shape[1], -1)

    def _logits(self, hidden: Tensor, head: int) -> Tensor:
        """(..., D) -> (..., Vd) of one head."""
        states = self.blocks[head](hidden)
        if self.lm_heads:
            logits: Tensor = self.lm_heads[head](states)
            return logits
        return nn.functional.linear(states.to(self.teacher_rows.dtype), self.teacher_rows)

    def translate(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
        """Heads of FasterDecoding's Medusa and of vLLM's form, blocks without bias included; see Drafter.translate."""
        prefix = r"(?:medusa_heads\.)?"
        rules = [
            (prefix + r"(\d+)\.(\d+)\.linear\.(weight|bias)", r"blocks.\1.\2.linear.\3"),
            (r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)", r"blocks.\1.\2.linear.\3"),
            (prefix + r"(\d+)\.\d+\.weight", r"lm_heads.\1.weight"),
        ]
        shared = [] if self.lm_heads else [prefix + r"\d+\.\d+\.weight", r"lm_heads\.\d+\.weight"]
        for name, tensor in tensors.items():
            if any(re.fullmatch(pattern, name) for pattern in shared) and not self._is_targets(tensor):
                raise InputError(f"the head's {name} is its own: set drafter.own_lm_heads=true")
        found = renamed(tensors, rules, shared)
        for name, parameter in self.named_parameters():
            if name.endswith("linear.bias"):
                found.setdefault(name, torch.zeros_like(parameter))
        return found

    def _is_targets(self, head: Tensor) -> bool:
        ours = self.teacher_rows.to(torch.bfloat16).cpu()
        return head.shape == ours.shape and torch.equal(head.to(torch.bfloat16), ours)

    def to_serving(self) -> Servable:
        """See Drafter.to_serving."""
        chosen = self.settings
        facts = {"num_heads": chosen.num_heads, "num_layers": chosen.num_layers, "own_lm_heads": chosen.own_lm_heads}
        return self.served("medusa", facts)
