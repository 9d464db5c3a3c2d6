"""Self-speculation (LayerSkip, arXiv:2404.16710; Kangaroo, arXiv:2404.18911): the target's first layers draft.

    row j:  h = the state that enters layer m of the target after reading x_j
            h = h + W_up SiLU(W_down RMSNorm_in(h));  q = the target's LM head(RMSNorm(h));  taught by p_j

Only the adapter is new: layers, LM head, and in decoding the keys and values of the first m layers are the target's
own, which it would have computed anyway. Drafted tokens leave theirs after the committed ones, where verification
overwrites them. Shape letters as in `train.drafters.base`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor, nn

from conf import config
from data.batch import Batch, TargetFeatures, Wants, last_rows
from data.cache import TargetCache
from data.decoder import TargetParts
from train.drafters.base import DraftState, Servable
from train.drafters.distilled import DistilledConfig
from train.drafters.flops import linear_flops
from train.drafters.layers import RMSNorm
from train.drafters.reader import Reader, require_forgetting
from train.drafters.serial import Ancestry


@config
class EarlyExitConfig(DistilledConfig):
    """Values: conf/drafter/early_exit.yaml."""

    exit_layer: int | None = Field(ge=1)
    """m, how many layers of the target draft; None takes a third of them."""
    adapter_size: int = Field(ge=1)
    """Rows of W_down."""
    init_seed: int
    """Of W_down; W_up starts at zero."""

    def build(self, target: TargetParts, draft_to_target_ids: Tensor) -> "EarlyExit":
        """Make the untrained adapter; see DrafterConfig.build.

        Raises:
            ValueError: if the target has no layer after `exit_layer`, or layers that cannot forget drafts.
        """
        return EarlyExit(self, target, draft_to_target_ids)


@dataclass
class EarlyExitState(DraftState):
    """Decoding state of B sequences."""

    cache: TargetCache | None = None
    """The target's own; the decoder looks after it."""
    last_tokens: Tensor | None = None
    """(B,) int64, the last committed token, which the target has not read yet."""
    ahead: TargetCache | None = None
    """`cache` as a proposal writes to it."""
    ancestry: Ancestry | None = None
    """Of the last committed token, and the drafts that the proposal has read."""

    def keep(self, sequences: Tensor) -> None:
        """See DraftState.keep."""
        self.last_tokens = None if self.last_tokens is None else self.last_tokens[sequences]


class EarlyExit(Reader):
    """The adapter; without training it is the identity."""

    settings: EarlyExitConfig
    drafts_untrained = True
    stack = "hf"

    def __init__(self, settings: EarlyExitConfig, target: TargetParts, draft_to_target_ids: Tensor) -> None:
        super().__init__(settings, target, draft_to_target_ids)
        width, num_layers = self.shape.hidden_size, len(target.decoder.layers)
        self.exit_layer = settings.exit_layer or max(1, num_layers // 3)
        if self.exit_layer >= num_layers:
            raise ValueError(f"drafter.exit_layer={self.exit_layer}: the target has only {num_layers} layers")
        require_forgetting(target.decoder, "target")
        self.wants = Wants(aux_layers=(self.exit_layer,), last_hidden_state=True)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.init_seed)
            self.input_norm = RMSNorm(width, self.shape.rms_norm_eps)
            self.down = nn.Linear(width, settings.adapter_size, bias=False)
            self.up = nn.Linear(settings.adapter_size, width, bias=False)
            self.norm = RMSNorm(width, self.shape.rms_norm_eps)
        with torch.no_grad():
            self.up.weight.zero_()
            self.norm.weight.copy_(target.final_norm)
        self._target_decoder = target.decoder

    def states(self, batch: Batch, features: TargetFeatures, rows: Tensor) -> Tensor:
        """See Reader.states."""
        return self._adapted(features.aux_hidden_states.flatten(0, 1).index_select(0, rows))

    def _adapted(self, hidden: Tensor) -> Tensor:
        hidden = hidden.to(self.up.weight.dtype)
        stream = hidden + self.up(nn.functional.silu(self.down(self.input_norm(hidden))))
        output: Tensor = self.norm(stream)
        return output

    def reading_flops(self, batch: Batch, rows: int) -> int:
        """See Reader.reading_flops. The target's layers are part of its own forward pass."""
        return linear_flops(self.down, rows) + linear_flops(self.up, rows)

    # --- decoding ----------------------------------------------------------------------------------------------------

    def start(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> EarlyExitState:
        """An empty state; see Proposer.start."""
        return EarlyExitState()

    def observe(self, state: EarlyExitState, features: TargetFeatures, next_ids: Tensor, counts: Tensor) -> None:
        """Remember where the text ends: the target has read the rest of it; see Proposer.observe."""
        state.cache = features.cache
        state.last_tokens = last_rows(next_ids, counts)

    def first_logits(self, state: EarlyExitState) -> Tensor:
        """(B, Vd); see SerialDrafter.first_logits."""
        if state.cache is None or state.last_tokens is None:
            raise ValueError("propose() needs a committed row to draft from: call observe() first")
        state.ahead = state.cache.fork()
        state.ancestry = Ancestry(len(state.last_tokens), state.last_tokens.device)
        root = torch.full_like(state.last_tokens, -1)[:, None]
        return self.extend(state, state.last_tokens[:, None], root - 1, 0)[:, 0]

    def extend(self, state: EarlyExitState, tokens: Tensor, parents: Tensor, depth: int) -> Tensor:
        """(B, W, Vd); see SerialDrafter.extend."""
        assert state.ahead is not None and state.ancestry is not None  # first_logits came before
        written = len(state.ancestry)
        visible = state.ancestry.add(parents + 1)  # row 0 is the last committed token, the drafts' root
        wants = Wants(aux_layers=self.wants.aux_layers, last_hidden_state=False)
        _, features = self._target_decoder.step(tokens, state.ahead, wants, visible, written, stop_early=True)
        return self.logits(self._adapted(features.aux_hidden_states))

    def to_serving(self) -> Servable:
        """See Drafter.to_serving."""
        return self.served("early_exit", {"exit_layer": self.exit_layer})
