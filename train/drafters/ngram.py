"""Drafting without a model: prompt lookup (n-gram) and suffix decoding. The baselines that every head must beat.

ngram   the continuation of an earlier occurrence of the longest matching n-gram (Saxena 2023, "Prompt lookup
        decoding"): of the latest one, or of the earliest as in vLLM and transformers
suffix  after the longest matching suffix, the most frequent continuation token by token, as far as its estimated
        probability holds (SuffixDecoding, arXiv:2411.04975); optionally over earlier outputs too

Both are deterministic functions of the text: verification treats their drafts as one-hot.
"""

from abc import abstractmethod
from collections import Counter
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


@config
class SuffixConfig(DrafterConfig):
    """Values: conf/drafter/suffix.yaml."""

    max_depth: int = Field(ge=1)
    """Longest suffix that is matched."""
    min_probability: float = Field(ge=0, le=1)
    """Stop where the most frequent continuation has less than this share of the continuations seen."""
    max_drafts_per_match: float = Field(gt=0)
    """Draft at most this many tokens per token of the match: short matches are weak evidence."""
    remember_outputs: bool
    """Draft from finished sequences too, not only from a sequence's own text."""

    def build(self, target: TargetParts, draft_to_target_ids: Tensor) -> "SuffixProposer":
        """Make the proposer; it needs nothing of the target."""
        return SuffixProposer(self)


class _TextProposer(Proposer):
    """What both have in common: they see tokens only, and propose chains of any length up to K."""

    wants = Wants(aux_layers=(), last_hidden_state=False)

    @abstractmethod
    def continuation(self, index: "TextIndex", num_draft_tokens: int) -> list[int]:
        """Up to K tokens that may follow the text."""

    def observe(self, state: "TextState", features: TargetFeatures, next_ids: Tensor, counts: Tensor) -> None:
        """Append the committed tokens; see Proposer.observe."""
        for index, row, count in zip(state.texts, next_ids.tolist(), counts.tolist(), strict=True):
            for token in row[:count]:
                index.append(token)
        state.device = next_ids.device

    def propose(
        self, state: "TextState", plan: DraftPlan, warp: Warp | None, generator: torch.Generator | None
    ) -> Draft:
        """Look up; see Proposer.propose.

        Raises:
            ValueError: if a tree is asked for.
        """
        if plan.kind != "chain":
            raise ValueError(f"{type(self).__name__} drafts chains only, a {plan.kind} was asked for: set draft=chain")
        drafts = [self.continuation(index, plan.num_draft_tokens) for index in state.texts]
        return Draft(
            tokens=padded(drafts, state.device),
            probs=None,
            num_drafts=torch.tensor([len(draft) for draft in drafts], device=state.device),
        )


Following = dict[tuple[int, ...], Counter[int]]
"""Context -> how often each token followed it."""


class TextIndex:
    """A text and, for every context of up to `depth` tokens in it, where it occurred and what followed."""

    def __init__(self, depth: int, remembered: Following | None) -> None:
        self.tokens: list[int] = []
        self._depth = depth
        self.latest: dict[tuple[int, ...], int] = {}
        """Context -> index of the token after its latest occurrence."""
        self.earliest: dict[tuple[int, ...], int] = {}
        """The same of its first."""
        self.following: Following = {} if remembered is None else remembered
        """Of this text alone, or of all texts that share it."""

    def append(self, token: int) -> None:
        """Add a token."""
        position = len(self.tokens)
        for context in self.contexts():
            self.latest[context] = position
            self.earliest.setdefault(context, position)
            self.following.setdefault(context, Counter())[token] += 1
        self.tokens.append(token)

    def contexts(self) -> Iterator[tuple[int, ...]]:
        """The last tokens as contexts, longest first."""
        for length in range(min(self._depth, len(self.tokens)), 0, -1):
            yield tuple(self.tokens[-length:])


@dataclass
class TextState(DraftState):
    """The texts of B sequences."""

    texts: list[TextIndex]
    device: torch.device

    def keep(self, sequences: Tensor) -> None:
        """See DraftState.keep."""
        self.texts = [self.texts[index] for index in sequences.tolist()]


class NgramProposer(_TextProposer):
    """Prompt lookup."""

    def __init__(self, settings: NgramConfig) -> None:
        self.settings = settings

    def start(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> TextState:
        """The first tokens of the prompts; see Proposer.start."""
        return _started(prompts, self.settings.max_ngram)

    def continuation(self, index: TextIndex, num_draft_tokens: int) -> list[int]:
        """What followed the chosen earlier occurrence of the longest n-gram at the end."""
        known = index.latest if self.settings.occurrence == "latest" else index.earliest
        for context in index.contexts():
            if len(context) < self.settings.min_ngram:
                break
            if context in known:
                start = known[context]
                return index.tokens[start : start + num_draft_tokens]
        return []


class SuffixProposer(_TextProposer):
    """Suffix decoding."""

    def __init__(self, settings: SuffixConfig) -> None:
        self.settings = settings
        self.remembered: Following | None = {} if settings.remember_outputs else None

    def start(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> TextState:
        """The first tokens of the prompts; see Proposer.start."""
        return _started(prompts, self.settings.max_depth, self.remembered)

    def continuation(self, index: TextIndex, num_draft_tokens: int) -> list[int]:
        """The most frequent continuation, while it is frequent enough."""
        drafts: list[int] = []
        context = index.tokens[-self.settings.max_depth :]
        match = self._match(index, context)
        room = min(num_draft_tokens, int(self.settings.max_drafts_per_match * match))
        while len(drafts) < room and match:
            following = self._following(index, tuple(context[-match:]))
            token, count = following.most_common(1)[0]
            if count < self.settings.min_probability * following.total():
                break
            drafts.append(token)
            context = [*context, token][-self.settings.max_depth :]
            match = self._match(index, context)
        return drafts

    def _match(self, index: TextIndex, context: list[int]) -> int:
        """Length of the longest suffix of `context` that has occurred before something; 0 if none has."""
        lengths = range(len(context), 0, -1)
        return next((n for n in lengths if self._following(index, tuple(context[-n:]))), 0)

    def _following(self, index: TextIndex, context: tuple[int, ...]) -> Counter[int]:
        return index.following.get(context, Counter())


def _started(prompts: Sequence[Sequence[int]], depth: int, remembered: Following | None = None) -> TextState:
    """States that hold the first token of each prompt; `observe` brings the rest."""
    texts = []
    for prompt in prompts:
        index = TextIndex(depth, remembered)
        index.append(prompt[0])
        texts.append(index)
    return TextState(texts, torch.device("cpu"))
