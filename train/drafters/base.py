"""The interface of every drafter, and the vocabulary that it shares with trainer and decoder.

A drafter answers three verbs: `loss` (training), `propose` (draft K tokens) and `observe` (learn what the target
committed). `greedy_drafts` is `propose` at every row of known text at once: validation walks over it.

Shape letters: B = packs, T = tokens, D = hidden size, V / Vd = target / draft vocabulary, K = drafted tokens,
S = training-time-test steps.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from conf import config
from data.batch import Batch, TargetFeatures, TargetParts, Wants


@config
class DrafterConfig:
    """What all drafters have in common: conf/drafter/*.yaml."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    """The family, as in conf/drafter/NAME.yaml."""
    draft_vocab_size: int | None = Field(ge=1)
    """Vd; None drafts over the target's whole vocabulary."""

    def build(self, target: TargetParts, draft_to_target_ids: Tensor) -> "Drafter":
        """Make the untrained drafter.

        Args:
            target: the frozen target that it runs ahead of.
            draft_to_target_ids: (Vd,) int64, ascending absolute ids.
        """
        raise TypeError(f"{type(self).__name__} builds no drafter: name a family's config in conf/drafter")


@dataclass(frozen=True)
class DraftLoss:
    """What one micro-batch adds to the loss of the global batch."""

    loss: Tensor
    """Scalar: the weighted sum over this micro-batch's rows; the global loss is the sum of these."""
    step_losses: Tensor
    """(S,) float32, loss of each step before the step weights."""
    step_matches: Tensor
    """(S,) float32, share of supervised tokens whose draft argmax is the target's argmax, step by step."""


@dataclass(frozen=True)
class Draft:
    """K proposed tokens."""

    tokens: Tensor
    """(1, K) int64, ids in the target's vocabulary."""
    probs: Tensor | None
    """(1, K, V) float32, the distribution that each token was really drawn from; None if the draft is deterministic
    (argmax), which verification must treat as a one-hot distribution."""


@dataclass(frozen=True)
class Servable:
    """A drafter as inference engines know it: canonical tensors and the facts that their configs state."""

    architecture: str
    """Family of the serving contract, e.g. "eagle3"."""
    tensors: dict[str, Tensor]
    """Names and shapes of serving.md, draft vocabulary as *absolute* `draft_to_target_ids`."""
    config: dict[str, Any]
    """Facts in our own terms; `serve_export` writes them in each engine's."""


Warp = Callable[[Tensor], Tensor]
"""(..., Vd) logits -> (..., Vd) probabilities after temperature, top-k and top-p."""


class Drafter(nn.Module, ABC):
    """A trainable head in front of a frozen target."""

    draft_to_target_ids: Tensor
    """(Vd,) int64 buffer, ascending absolute ids; part of the checkpoint."""
    wants: Wants
    """What the target must compute for this drafter."""

    @abstractmethod
    def loss(self, batch: Batch, features: TargetFeatures) -> DraftLoss:
        """The training loss of a micro-batch of packed documents."""

    @abstractmethod
    def greedy_drafts(self, batch: Batch, features: TargetFeatures, num_draft_tokens: int) -> Tensor:
        """(B, T, K) int64: what `propose` would draft greedily after row t, given that the text is right so far.

        Entry [b, t, k] is the draft for token t + 2 + k, valid while the drafts before it equal the text. Rows whose
        drafts would leave the document hold arbitrary ids.
        """

    @abstractmethod
    def start(self, max_tokens: int) -> Any:
        """A fresh decoding state for one sequence of at most `max_tokens` tokens."""

    @abstractmethod
    def observe(self, state: Any, features: TargetFeatures, next_ids: Tensor) -> None:
        """Take in M committed rows: replaces whatever `propose` simulated after the last committed one.

        Args:
            state: from `start`, updated in place.
            features: the target's true features of M consecutive rows, (1, M, ...).
            next_ids: (1, M) int64, the committed token that follows each row.
        """

    @abstractmethod
    def propose(self, state: Any, num_draft_tokens: int, warp: Warp | None, generator: torch.Generator | None) -> Draft:
        """Draft K tokens after the last committed one.

        Args:
            state: after at least one `observe`.
            num_draft_tokens: K.
            warp: turns logits into the distribution to sample from; None drafts greedily.
            generator: source of randomness when sampling.
        """

    @abstractmethod
    def to_serving(self) -> Servable:
        """Canonical tensors and facts for export."""

    def forward(self, batch: Batch, features: TargetFeatures) -> tuple[Tensor, Tensor, Tensor]:
        """The fields of `loss`, as DeepSpeed calls it: under ZeRO-3 its hooks see into tuples, not into dataclasses."""
        result = self.loss(batch, features)
        return result.loss, result.step_losses, result.step_matches

    def num_trainable_parameters(self) -> int:
        """Trainable elements; under ZeRO-3, where a rank holds only its part, ask before the engine is built."""
        return sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)
