"""How to decode, and what came of it: the records of `eval.generate`."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from eval.rounds import Outcome, Rule
from eval.sampling import SamplingConfig
from train.drafters.base import Draft, DraftPlan
from train.roofline import Tally


@dataclass(frozen=True)
class Decoding:
    """How to decode."""

    max_tokens: int
    """Most tokens to generate per prompt."""
    sampling: SamplingConfig
    plan: DraftPlan
    """Unused by plain decoding."""
    rule: Rule
    """Of verification when sampling."""
    trace: bool
    """Record every draft of every round."""
    static_shapes: bool
    """Read the whole cache in every step, so that all rounds have one shape (compiled graphs)."""

    def shortened(self, max_tokens: int) -> "Decoding":
        """The same for shorter answers."""
        return replace(self, max_tokens=min(max_tokens, self.max_tokens))


@dataclass(frozen=True)
class Round:
    """One draft-verify-commit round of one sequence."""

    num_accepted: int
    """Drafted tokens kept and emitted."""
    num_emitted: int
    """Tokens added to the output: num_accepted, and the target's own unless the output ended before it."""
    num_drafted: int
    """Drafts that were verified; 0 where the proposer had none."""
    target_gap: float
    """Smallest difference between the two largest target logits over the rows that decided this round: where it is
    tiny, rounding may decide otherwise."""
    drafts: list[dict[str, float]] | None
    """With `trace`: token, parent, draft_prob, target_prob and accepted of every draft."""


@dataclass
class Generation:
    """One answer."""

    tokens: list[int] = field(default_factory=list)
    """Generated ids, end-of-turn token included."""
    rounds: list[Round] = field(default_factory=list)
    """Empty for plain decoding."""


@dataclass
class Clock(Tally):
    """Seconds of one call, by what they were spent on."""

    prefill: float = 0.0
    """Forward pass of the prompts, and the first token."""
    target: float = 0.0
    """Forward passes of the target after that."""
    drafter: float = 0.0
    """`propose` and `observe` after that."""
    total: float = 0.0
    """Everything after the prefill; what is in neither target nor drafter is overhead."""


@dataclass
class Batched:
    """Answers of one call."""

    answers: list[Generation]
    """In the order of the prompts."""
    clock: Clock


def smallest_gaps(logits: Tensor, outcome: Outcome) -> list[float]:
    """For each sequence the smallest top-2 gap of (B, M, V) logits over the rows that decided the round."""
    top = logits.topk(2, dim=-1).values
    gaps = (top[..., 0] - top[..., 1]).float().gather(1, outcome.path)  # (B, P); padding repeats a row that counts
    beyond = torch.arange(outcome.path.shape[1], device=logits.device) >= outcome.counts[:, None]
    smallest: list[float] = gaps.masked_fill(beyond, float("inf")).amin(dim=1).tolist()
    return smallest


def trace(draft: Draft, logits: Tensor, outcome: Outcome, decoding: Decoding) -> list[list[dict[str, float]]]:
    """Every draft of a round, for reports: what drafter and target thought of it, and whether it was kept."""
    sampling = decoding.sampling
    target_probs = logits.float().softmax(dim=-1) if sampling.greedy else sampling.probs(logits)
    nodes = draft.tokens.shape[1]
    chain = torch.arange(-1, nodes - 1, device=logits.device).expand(len(logits), -1)
    parents = chain if draft.parents is None else draft.parents
    before = (parents + 1)[..., None].expand(-1, -1, target_probs.shape[-1])
    p = target_probs.gather(1, before).gather(2, draft.tokens[..., None]).squeeze(2).tolist()
    q = torch.ones_like(draft.tokens, dtype=torch.float32)
    if draft.probs is not None:
        rows = draft.probs if draft.parents is None else draft.probs.gather(1, before)
        q = rows.gather(2, draft.tokens[..., None]).squeeze(2)
    counts = [nodes] * len(p) if draft.num_drafts is None else draft.num_drafts.tolist()
    traces = []
    for row, count in enumerate(counts):
        kept = set(outcome.path[row, : int(outcome.counts[row])].tolist())
        traces.append(
            [
                {
                    "token": int(draft.tokens[row, node]), "parent": int(parents[row, node]),
                    "draft_prob": float(q[row, node]), "target_prob": p[row][node], "accepted": node + 1 in kept,
                }
                for node in range(count)
            ]
        )  # fmt: skip
    return traces
