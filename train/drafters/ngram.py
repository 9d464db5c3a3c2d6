"""Drafting without a model: what every text proposer shares, and prompt lookup (n-gram), a baseline for every head.

The continuation of an earlier occurrence of the longest matching n-gram (Saxena 2023, "Prompt lookup decoding"): of the
latest one, or of the earliest as in vLLM and transformers. A deterministic function of the text: verification treats
its drafts as one-hot.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from conf import config
from data.batch import TargetFeatures, Wants, padded
from data.decoder import TargetParts
from train.drafters.base import Draft, DrafterConfig, DraftPlan, DraftState, Proposer, Warp


@config
class NgramConfig(DrafterConfig):
    """Values: conf/drafter/ngram.yaml."""

    min_ngram: int = Field(ge=1)
    """Shortest match that is drafted from."""
    max_ngram: int = Field(ge=1)
    """Longest match that is looked for."""
    occurrence: Literal["latest", "earliest"]
    """Which of several equal matches is gone on from; vLLM and transformers take the earliest."""

    def build(self, target: TargetParts, draft_to_target_ids: Tensor) -> "NgramProposer":
        """Make the proposer; it needs nothing of the target.

        Raises:
            ValueError: if min_ngram exceeds max_ngram.
        """
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram={self.min_ngram} exceeds max_ngram={self.max_ngram}")
        return NgramProposer(self)


class TextIndex(ABC):
    """A text that knows what may follow it."""

    @abstractmethod
    def append(self, token: int) -> None:
        """Add a token."""

    @abstractmethod
    def continuation(self, num_draft_tokens: int) -> list[int]:
        """Up to K tokens that may follow the text."""


@dataclass
class TextState(DraftState):
    """The texts of B sequences."""

    texts: list[TextIndex]
    device: torch.device

    def keep(self, sequences: Tensor) -> None:
        """See DraftState.keep."""
        self.texts = [self.texts[index] for index in sequences.tolist()]


class TextProposer(Proposer):
    """Sees tokens only, and proposes chains of any length up to K."""

    wants = Wants(aux_layers=(), last_hidden_state=False)

    @abstractmethod
    def index(self, prompt_length: int) -> TextIndex:
        """An empty text whose first tokens will be a prompt of this length."""

    def start(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> TextState:
        """Texts that hold the first token of each prompt, `observe` brings the rest; see Proposer.start."""
        texts = [self.index(len(prompt)) for prompt in prompts]
        for text, prompt in zip(texts, prompts, strict=True):
            text.append(prompt[0])
        return TextState(texts, torch.device("cpu"))

    def observe(self, state: TextState, features: TargetFeatures, next_ids: Tensor, counts: Tensor) -> None:
        """Append the committed tokens; see Proposer.observe."""
        for text, row, count in zip(state.texts, next_ids.tolist(), counts.tolist(), strict=True):
            for token in row[:count]:
                text.append(token)
        state.device = next_ids.device

    def propose(self, state: TextState, plan: DraftPlan, warp: Warp | None, generator: torch.Generator | None) -> Draft:
        """Look up; see Proposer.propose.

        Raises:
            ValueError: if a tree is asked for.
        """
        if plan.kind != "chain":
            raise ValueError(f"{type(self).__name__} drafts chains only, a {plan.kind} was asked for: set draft=chain")
        drafts = [text.continuation(plan.num_draft_tokens) for text in state.texts]
        return Draft(
            tokens=padded(drafts, state.device),
            probs=None,
            num_drafts=torch.tensor([len(draft) for draft in drafts], device=state.device),
        )


class NgramIndex(TextIndex):
    """A text and, for every n-gram in it, where it occurred."""

    def __init__(self, settings: NgramConfig) -> None:
        self._settings = settings
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        """N-gram -> index of the token after the occurrence that is gone on from."""

    def append(self, token: int) -> None:
        """See TextIndex.append."""
        position = len(self._tokens)
        for ngram in self._ngrams():
            if self._settings.occurrence == "latest":
                self._after[ngram] = position
            else:
                self._after.setdefault(ngram, position)
        self._tokens.append(token)

    def continuation(self, num_draft_tokens: int) -> list[int]:
        """What followed the chosen earlier occurrence of the longest n-gram at the end."""
        start = next((self._after[ngram] for ngram in self._ngrams() if ngram in self._after), None)
        return [] if start is None else self._tokens[start : start + num_draft_tokens]

    def _ngrams(self) -> Iterator[tuple[int, ...]]:
        """Those at the end of the text, longest first."""
        for length in range(min(self._settings.max_ngram, len(self._tokens)), self._settings.min_ngram - 1, -1):
            yield tuple(self._tokens[-length:])


class NgramProposer(TextProposer):
    """Prompt lookup."""

    def __init__(self, settings: NgramConfig) -> None:
        self.settings = settings

    def index(self, prompt_length: int) -> NgramIndex:
        """See TextProposer.index."""
        return NgramIndex(self.settings)
