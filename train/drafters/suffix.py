"""Suffix decoding (SuffixDecoding, arXiv:2411.04975): drafting without a model, from counts. A baseline for every head.

For every length of match between the end of the text and what came before: the most frequent continuation, token by
token, as long as its estimated probability holds; drafted is the one that promises most accepted tokens. Rules, ties
included, are those of the implementation that vLLM serves it with (arctic-inference), along a chain.
"""

from pydantic import Field
from torch import Tensor

from conf import config
from data.decoder import TargetParts
from train.drafters.base import DrafterConfig
from train.drafters.ngram import TextIndex, TextProposer


@config
class SuffixConfig(DrafterConfig):
    """Values: conf/drafter/suffix.yaml."""

    max_tree_depth: int = Field(ge=2)
    """Longest match and its continuation, together."""
    max_spec_factor: float = Field(gt=0)
    """Draft at most this many tokens per token of the match: short matches are weak evidence."""
    min_token_prob: float = Field(ge=0, le=1)
    """Stop where the estimated probability of the whole continuation is less than this."""
    remember_outputs: bool
    """Draft from what other sequences were answered too, not only from a sequence's own text."""

    def build(self, target: TargetParts, draft_to_target_ids: Tensor) -> "SuffixProposer":
        """Make the proposer; it needs nothing of the target."""
        return SuffixProposer(self)


class SuffixTree:
    """How often each string of up to `max_tree_depth` tokens occurred, and what followed it."""

    def __init__(self, settings: SuffixConfig) -> None:
        self._settings = settings
        self._counts: dict[tuple[int, ...], int] = {}
        self._children: dict[tuple[int, ...], list[int]] = {}
        """String -> the tokens that followed it, most frequent first."""

    def append(self, recent: list[int], token: int) -> None:
        """Add `token`, which came after `recent` (the last tokens of its sequence, max_tree_depth - 1 of them)."""
        for length in range(len(recent) + 1):
            context = tuple(recent[len(recent) - length :])
            string = (*context, token)
            count = self._counts.get(string, 0) + 1
            if length:
                self._rank(context, token, count)
            self._counts[string] = count

    def _rank(self, context: tuple[int, ...], token: int, count: int) -> None:
        """Move `token` among the children of `context`, as it has now occurred there `count` times.

        A new token is the last. A known one that reaches or passes the token before it goes before all tokens that are
        as frequent as that one.
        """
        children = self._children.setdefault(context, [])
        if token not in children:
            children.append(token)
            return
        at = children.index(token)
        if at == 0:
            return
        before = self._counts[*context, children[at - 1]]
        if before <= count:
            first = next(i for i, child in enumerate(children) if self._counts[*context, child] == before)
            children.insert(first, children.pop(at))

    def speculate(self, recent: list[int], num_draft_tokens: int) -> tuple[float, list[int]]:
        """(expected number of accepted tokens, drafts) after `recent`, the last max_tree_depth tokens of a sequence."""
        best: tuple[float, list[int]] = (0.0, [])
        for length in range(1, len(recent)):
            context = tuple(recent[-length:])
            if context not in self._counts:
                break
            room = min(num_draft_tokens, int(self._settings.max_spec_factor * length + 1e-6))
            found = self._most_frequent(context, room)
            if found[0] >= best[0]:  # of equals, the longer match
                best = found
        return best

    def _most_frequent(self, string: tuple[int, ...], room: int) -> tuple[float, list[int]]:
        score, probability, drafts = 0.0, 1.0, list[int]()
        while len(drafts) < room and string in self._children:
            token = self._children[string][0]
            probability *= self._counts[*string, token] / self._counts[string]
            if probability < self._settings.min_token_prob:
                break
            drafts.append(token)
            score += probability
            string = (*string, token)
        return score, drafts


class SuffixIndex(TextIndex):
    """A text, its own tree, and the tree of all answers if they are remembered."""

    def __init__(self, settings: SuffixConfig, prompt_length: int, answers: SuffixTree | None) -> None:
        self._depth = settings.max_tree_depth
        self._prompt_length = prompt_length
        self._tokens: list[int] = []
        self._own = SuffixTree(settings)
        self._answers = answers

    def append(self, token: int) -> None:
        """See TextIndex.append."""
        self._own.append(self._tokens[1 - self._depth :], token)
        if self._answers is not None and len(self._tokens) >= self._prompt_length:
            self._answers.append(self._tokens[self._prompt_length :][1 - self._depth :], token)
        self._tokens.append(token)

    def continuation(self, num_draft_tokens: int) -> list[int]:
        """From the tree that promises more; from the text's own if both promise the same."""
        recent = self._tokens[-self._depth :]
        best = self._own.speculate(recent, num_draft_tokens)
        if self._answers is not None:
            other = self._answers.speculate(recent, num_draft_tokens)
            best = other if other[0] > best[0] else best
        return best[1]


class SuffixProposer(TextProposer):
    """Suffix decoding."""

    def __init__(self, settings: SuffixConfig) -> None:
        self.settings = settings
        self._answers = SuffixTree(settings) if settings.remember_outputs else None

    def index(self, prompt_length: int) -> SuffixIndex:
        """See TextProposer.index."""
        return SuffixIndex(self.settings, prompt_length, self._answers)
