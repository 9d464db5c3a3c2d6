"""The embedded decoder: plain decoding, and lossless speculative decoding of several sequences at once.

A round: the proposer drafts after the committed text; the target reads the last committed token and the drafts in one
cached forward pass; verification keeps some of them and adds one token of the target's own; the caches commit what was
kept, each sequence by its own count; the proposer takes in the target's true features of the kept rows. Sequences that
have ended leave the batch.

Counting: a round's `num_accepted` are the drafts kept *and emitted*. Drafts beyond the end of the output (end-of-turn
token or token limit) are not counted, and the round that ends there still counts as a round. `train.acceptance` counts
the same way.

Shape letters: B = sequences still running, M = rows of a step, N = drafts, V = target vocabulary.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from data.batch import TargetFeatures, Wants, last_rows, padded
from data.target import Target
from eval.generation import Batched, Clock, Decoding, Generation, Round, smallest_gaps, trace
from eval.rounds import Outcome, ancestor_mask, verify_round
from eval.verify import Dice
from train.drafters.base import Draft, DraftState, Proposer


@torch.inference_mode()
def plain_generate(
    target: Target, prompts: Sequence[Sequence[int]], decoding: Decoding, generator: torch.Generator | None = None
) -> Batched:
    """Autoregressive decoding with the same target code and cache: the baseline of every speed-up.

    Args:
        target: the model.
        prompts: token ids, generation prompt included; of any lengths.
        decoding: `plan`, `rule` and `trace` are unused.
        generator: source of randomness, unused at temperature 0.
    """
    wants = Wants(aux_layers=(), last_hidden_state=False)
    run = _Run(target, prompts, decoding, 0, generator)
    run.prefill(wants)
    while run.rows:
        with _spent(run.clock, "target"):
            last, _ = target.step(run.last_tokens()[:, None], run.cache, wants)
            logits = target.logits(last[:, 0])
        run.cache.commit(torch.ones_like(run.cache.lengths))
        chosen = run.choose(logits).tolist()
        run.emit([[token] for token in chosen])
        run.keep_running()
    return run.finish()


@torch.inference_mode()
def speculative_generate(
    target: Target,
    proposer: Proposer,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    generator: torch.Generator | None = None,
) -> Batched:
    """Speculative decoding: the law of the output is that of `plain_generate`, token for token at temperature 0.

    Args:
        target: the model.
        proposer: in the target's dtype and on its device.
        prompts: token ids, generation prompt included; of any lengths.
        decoding: how.
        generator: source of randomness, unused at temperature 0.
    """
    plan = decoding.plan
    warp = None if decoding.sampling.greedy else decoding.sampling.probs
    run = _Run(target, prompts, decoding, plan.max_nodes, generator)
    features = run.prefill(proposer.wants)
    with _spent(run.clock, "drafter"):
        state = proposer.start(prompts, run.cache.capacity)
        proposer.observe(state, features, run.after_prompt(), run.cache.lengths)
        run.keep_running(state)
    while run.rows:
        with _spent(run.clock, "drafter"):
            draft = proposer.propose(state, plan, warp, generator)
        with _spent(run.clock, "target"):
            read = torch.cat([run.last_tokens()[:, None], draft.tokens], dim=1)  # (B, N + 1)
            last, features = target.step(read, run.cache, proposer.wants, ancestor_mask(draft))
            logits = target.logits(last)
        logits = run.penalised(logits, draft)
        outcome = verify_round(draft, logits, decoding.sampling, decoding.rule, run.dice)
        committed = outcome.committed(draft)
        run.commit(draft, outcome)
        with _spent(run.clock, "drafter"):
            kept = features.select(outcome.path[:, : int(outcome.counts.max())])
            proposer.observe(state, kept, padded(committed, target.device), outcome.counts)
        run.record(draft, logits, outcome, committed)
        run.keep_running(state)
    return run.finish()


class _Run:
    """The sequences of one call: texts, caches and clock."""

    def __init__(
        self,
        target: Target,
        prompts: Sequence[Sequence[int]],
        decoding: Decoding,
        max_drafts: int,
        generator: torch.Generator | None,
    ) -> None:
        self.target, self.decoding, self.prompts = target, decoding, prompts
        self.dice = Dice(generator)
        self.answers = [Generation() for _ in prompts]
        self.rows = list(range(len(prompts)))  # the sequences still in the batch
        self.clock = Clock()
        capacity = max(map(len, prompts)) + decoding.max_tokens + max_drafts + 1
        self.cache = target.new_cache(len(prompts), capacity, decoding.static_shapes)
        self._seen: Tensor | None = None

    # --- prompts -----------------------------------------------------------------------------------------------------

    def prefill(self, wants: Wants) -> TargetFeatures:
        """Read the prompts, padded on the right, and choose the first tokens; returns features of all rows."""
        started = time.perf_counter()
        last, features = self.target.step(padded(self.prompts, self.target.device), self.cache, wants)
        lengths = torch.tensor([len(prompt) for prompt in self.prompts], device=self.target.device)
        self.cache.commit(lengths)
        logits = self.target.logits(last_rows(last, lengths))
        if self.decoding.sampling.penalises:
            self._seen = torch.zeros_like(logits, dtype=torch.bool)
            for row, prompt in enumerate(self.prompts):
                self._seen[row, torch.tensor(prompt, device=lengths.device)] = True
        self.emit([[token] for token in self.choose(logits).tolist()])
        self.clock.prefill = time.perf_counter() - started
        self._started = time.perf_counter()
        return features

    def after_prompt(self) -> Tensor:
        """(B, longest prompt) int64: the token after each row of the prompts."""
        return padded(
            [[*prompt[1:], answer.tokens[0]] for prompt, answer in zip(self.prompts, self.answers, strict=True)],
            self.target.device,
        )

    # --- rounds ------------------------------------------------------------------------------------------------------

    def last_tokens(self) -> Tensor:
        """(B,) the last committed token of each running sequence."""
        return torch.tensor([self.answers[row].tokens[-1] for row in self.rows], device=self.target.device)

    def choose(self, logits: Tensor) -> Tensor:
        """(B, V) logits -> (B,) tokens of the target's own."""
        sampling = self.decoding.sampling
        if self._seen is not None:
            logits = sampling.penalise(logits, self._seen)
        return logits.argmax(dim=-1) if sampling.greedy else self.dice.draw(sampling.probs(logits))

    def penalised(self, logits: Tensor, draft: Draft) -> Tensor:
        """(B, N + 1, V): the repetition penalty, each row with its own history (text and the drafts before it)."""
        if self._seen is None:
            return logits
        seen = self._seen[:, None].repeat(1, logits.shape[1], 1)
        visible = ancestor_mask(draft)
        if visible is None:
            rows = torch.arange(logits.shape[1], device=logits.device)
            visible = (rows <= rows[:, None]).expand(len(logits), -1, -1)
        for node in range(draft.tokens.shape[1]):
            batch, row = torch.nonzero(visible[:, :, node + 1], as_tuple=True)
            seen[batch, row, draft.tokens[batch, node]] = True
        return self.decoding.sampling.penalise(logits, seen)

    def commit(self, draft: Draft, outcome: Outcome) -> None:
        """Let the target's cache keep what the round kept."""
        if draft.parents is None:
            self.cache.commit(outcome.counts)
        else:
            self.cache.commit_path(outcome.path, outcome.counts)

    def emit(self, committed: list[list[int]]) -> list[int]:
        """Add tokens to the outputs, up to an end-of-turn token or the limit; returns how many each sequence took."""
        taken = []
        for row, tokens in zip(self.rows, committed, strict=True):
            answer = self.answers[row].tokens
            room = tokens[: self.decoding.max_tokens - len(answer)]
            end = next((i + 1 for i, token in enumerate(room) if token in self.target.eos_token_ids), len(room))
            answer += room[:end]
            taken.append(end)
        if self._seen is not None:
            for index, tokens in enumerate(committed):
                self._seen[index, torch.tensor(tokens, device=self._seen.device)] = True
        return taken

    def record(self, draft: Draft, logits: Tensor, outcome: Outcome, committed: list[list[int]]) -> None:
        """Emit a round's tokens and note what happened."""
        gaps = smallest_gaps(logits, outcome)
        drafted = [draft.tokens.shape[1]] * len(committed) if draft.num_drafts is None else draft.num_drafts.tolist()
        details = trace(draft, logits, outcome, self.decoding) if self.decoding.trace else [None] * len(committed)
        for index, taken in enumerate(self.emit(committed)):
            accepted = min(len(committed[index]) - 1, taken)
            self.answers[self.rows[index]].rounds.append(
                Round(accepted, taken, drafted[index], gaps[index], details[index])
            )

    def keep_running(self, state: DraftState | None = None) -> None:
        """Sequences that have ended leave the batch."""
        running = [index for index, row in enumerate(self.rows) if not self._ended(self.answers[row].tokens)]
        if len(running) == len(self.rows):
            return
        self.rows = [self.rows[index] for index in running]
        kept = torch.tensor(running, dtype=torch.int64, device=self.target.device)
        self.cache.keep(kept)
        if self._seen is not None:
            self._seen = self._seen[kept]
        if state is not None:
            state.keep(kept)

    def _ended(self, tokens: list[int]) -> bool:
        return len(tokens) >= self.decoding.max_tokens or tokens[-1] in self.target.eos_token_ids

    def finish(self) -> Batched:
        """The answers."""
        self.clock.total = time.perf_counter() - self._started
        return Batched(self.answers, self.clock)


@contextmanager
def _spent(clock: Clock, part: Literal["target", "drafter"]) -> Iterator[None]:
    started = time.perf_counter()
    yield
    setattr(clock, part, getattr(clock, part) + time.perf_counter() - started)
