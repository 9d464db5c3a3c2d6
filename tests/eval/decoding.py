"""Short names for how to decode."""

from typing import Any

from eval.generation import Decoding
from eval.sampling import SamplingConfig
from train.drafters.base import DraftPlan

GREEDY = SamplingConfig(temperature=0.0, top_k=None, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
SAMPLED = SamplingConfig(temperature=1.0, top_k=None, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
WARPED = SamplingConfig(temperature=0.7, top_k=None, top_p=0.9, min_p=0.0, repetition_penalty=1.0)


def static_tree(*branches: int) -> DraftPlan:
    return DraftPlan(num_draft_tokens=len(branches), kind="static_tree", branches=branches, top_k=1, total_tokens=0)


def dynamic_tree(depth: int, top_k: int, total: int) -> DraftPlan:
    return DraftPlan(num_draft_tokens=depth, kind="dynamic_tree", branches=(), top_k=top_k, total_tokens=total)


def decoding(plan: DraftPlan, max_tokens: int = 40, sampling: SamplingConfig = GREEDY, **changes: Any) -> Decoding:
    fields: dict[str, Any] = {"rule": "token", "trace": False, "static_shapes": False}
    return Decoding(max_tokens=max_tokens, sampling=sampling, plan=plan, **(fields | changes))
