"""The interface of everything that drafts, and the vocabulary that it shares with trainer and decoder.

A `Proposer` answers the decoder's verbs: `start`, `observe` (learn what the target committed), `propose` (draft). A
`Drafter` is a proposer that is trained: it adds `loss`, `greedy_drafts` (`propose` at every row of known text at once,
which validation walks over) and `to_serving`. Model-free proposers (n-gram, suffix) are not trained.

Shape letters: B = sequences or packs, T = tokens, M = rows of one call, D = hidden size, V / Vd = target / draft
vocabulary, K = drafted tokens of a chain, N = drafted tokens, S = training-time-test steps.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from conf import InputError, config
from data.batch import Batch, TargetFeatures, Wants
from data.decoder import TargetParts


@config
class DrafterConfig:
    """What all drafters have in common: conf/drafter/*.yaml."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    """The family, as in conf/drafter/NAME.yaml."""
    draft_vocab_size: int | None = Field(ge=1)
    """Vd; None drafts over the target's whole vocabulary."""

    def warm_start(self) -> str | None:
        """Folder of a head that training starts from."""
        return None

    def families(self) -> tuple[str, ...]:
        """Names of the families whose checkpoints training can start from."""
        return (self.name,)

    def build(self, target: TargetParts, draft_to_target_ids: Tensor) -> "Proposer":
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


@config
class DraftPlan:
    """How much to draft, and in what shape: conf/draft/*.yaml."""

    num_draft_tokens: int = Field(ge=1)
    """K: the longest path."""
    kind: Literal["chain", "static_tree", "dynamic_tree"]
    branches: tuple[int, ...]
    """static_tree: children of each node, depth by depth (K numbers)."""
    top_k: int = Field(ge=1)
    """dynamic_tree: children tried per node, and nodes expanded per depth."""
    total_tokens: int = Field(ge=0)
    """dynamic_tree: nodes kept of all that were tried, those on the most probable paths."""

    def __post_init__(self) -> None:
        if self.kind == "static_tree" and (len(self.branches) != self.num_draft_tokens or min(self.branches) < 1):
            raise ValueError(
                f"a static tree of depth num_draft_tokens={self.num_draft_tokens} needs as many draft.branches, "
                f"each at least 1; got {list(self.branches)}"
            )
        if self.kind == "dynamic_tree" and self.total_tokens < 1:
            raise ValueError(f"a dynamic tree needs draft.total_tokens of at least 1, got {self.total_tokens}")

    @property
    def max_nodes(self) -> int:
        """Most tokens that a proposal has."""
        if self.kind == "chain":
            return self.num_draft_tokens
        if self.kind == "dynamic_tree":
            return self.total_tokens
        nodes, width = 0, 1
        for branch in self.branches:
            width *= branch
            nodes += width
        return nodes


@dataclass(frozen=True)
class Draft:
    """Proposed tokens: a chain, or a tree with the committed text as its root."""

    tokens: Tensor
    """(B, N) int64, ids in the target's vocabulary. Trees: parents before children, siblings in the order drawn."""
    probs: Tensor | None
    """The distributions that tokens were really drawn from; None if the draft is deterministic, which verification must
    treat as one-hot distributions. Chains: (B, K, V) float32. Trees: (B, N + 1, V), row 0 for the children of the
    root, row i + 1 for those of node i."""
    parents: Tensor | None = None
    """Trees: (B, N) int64, each node's parent, -1 for the root. None: a chain."""
    num_drafts: Tensor | None = None
    """(B,) int64, how many tokens of each chain are drafts (the rest is filling); None: all."""


@dataclass(frozen=True)
class Servable:
    """A drafter as inference engines know it: canonical tensors and the facts that their configs state."""

    architecture: str
    """Family of the serving contract, e.g. "eagle3"."""
    tensors: dict[str, Tensor]
    """Names and shapes of serving.md, draft vocabulary as *absolute* `draft_to_target_ids`."""
    config: dict[str, Any]
    """Facts in our own terms; `serve_export` writes them in each engine's."""
    target_tensors: dict[str, Tensor] = field(default_factory=dict)
    """Tensors of the target's own folder that training has changed, under the names that they have there."""


Warp = Callable[[Tensor], Tensor]
"""(..., Vd) logits -> (..., Vd) probabilities after temperature, top-k, top-p and min-p."""


class DraftState(ABC):
    """What a proposer knows of B sequences."""

    @abstractmethod
    def keep(self, sequences: Tensor) -> None:
        """Forget all but the given sequences (B',) int64."""


class Proposer(ABC):
    """Whatever runs ahead of the target."""

    wants: Wants
    """What the target must compute for it."""

    @abstractmethod
    def start(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Any:
        """A fresh state (a DraftState) for these sequences, each of at most `max_tokens` tokens."""

    @abstractmethod
    def observe(self, state: Any, features: TargetFeatures, next_ids: Tensor, counts: Tensor) -> None:
        """Take in committed rows: replaces whatever `propose` simulated after the last committed one.

        Args:
            state: from `start`, updated in place.
            features: the target's true features of up to M consecutive rows of each sequence, (B, M, ...).
            next_ids: (B, M) int64, the committed token that follows each row.
            counts: (B,) int64, 1..M: how many of the rows each sequence has; the others hold anything.
        """

    @abstractmethod
    def propose(self, state: Any, plan: DraftPlan, warp: Warp | None, generator: torch.Generator | None) -> Draft:
        """Draft after the last committed token of each sequence.

        Args:
            state: after at least one `observe`.
            plan: how much, in what shape.
            warp: turns logits into the distribution to sample from; None drafts greedily.
            generator: source of randomness when sampling.
        """


class Drafter(nn.Module, Proposer):
    """A trainable head in front of a frozen target."""

    draft_to_target_ids: Tensor
    """(Vd,) int64 buffer, ascending absolute ids; part of the checkpoint."""
    max_draft_tokens: int | None = None
    """The longest path that it can draft; None: any."""
    drafts_untrained: bool = False
    """Whether it is of use before any training (a draft model off the shelf)."""
    stack: str = "vllm"
    """The stack (conf/stack) to export it for first; "hf" where no engine has a place for it."""

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
    def to_serving(self) -> Servable:
        """Canonical tensors and facts for export."""

    @abstractmethod
    def flops(self, batch: Batch) -> int:
        """FLOPs of the matrix products of `loss` on this batch and of its gradient, by the formulas of
        `train.drafters.flops`: what model FLOPs utilisation is measured by."""

    def changed_target(self) -> Any | None:
        """The target's model (of transformers) as training has changed it, which is what has to be decoded with and
        served; None: the target is as it was."""
        return None

    def translate(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
        """Another trainer's head in this family's names, for training that starts from it.

        Args:
            tensors: as stored, vocabulary maps included.
            config: its config.json.

        Raises:
            InputError: if its conventions are others, or cannot be told.
        """
        raise InputError(f"{type(self).__name__} heads of other trainers cannot be read: give one of our checkpoints")

    def forward(self, batch: Batch, features: TargetFeatures) -> tuple[Tensor, Tensor, Tensor]:
        """The fields of `loss`, as DeepSpeed calls it: under ZeRO-3 its hooks see into tuples, not into dataclasses."""
        result = self.loss(batch, features)
        return result.loss, result.step_losses, result.step_matches

    def num_trainable_parameters(self) -> int:
        """Trainable elements; under ZeRO-3, where a rank holds only its part, ask before the engine is built."""
        return sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)


def require_reach(drafter: Drafter, num_draft_tokens: int) -> None:
    """Refuse more drafts than there are heads for.

    Raises:
        InputError: naming the most.
    """
    longest = drafter.max_draft_tokens
    if longest is not None and num_draft_tokens > longest:
        raise InputError(f"num_draft_tokens={num_draft_tokens}: this drafter drafts at most {longest} tokens")


def chain(num_draft_tokens: int) -> DraftPlan:
    """The plan of a plain chain of K drafts."""
    return DraftPlan(num_draft_tokens=num_draft_tokens, kind="chain", branches=(), top_k=1, total_tokens=0)
