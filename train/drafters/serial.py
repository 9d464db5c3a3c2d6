"""Drafters that guess one token after the other (EAGLE, MTP, draft models): how a chain or a tree grows.

A family only says what its logits are after the committed text (`first_logits`) and after a node of the tree
(`extend`); choosing tokens, sampling and pruning are the same for all.

Shape letters as in `train.drafters.base`; W = nodes of one depth.
"""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from train.drafters.base import Draft, Drafter, DraftPlan, Warp


class Ancestry:
    """Which of the rows simulated so far each of them sees: the rows before it on its path, and itself."""

    def __init__(self, batch_size: int, device: torch.device) -> None:
        self._seen = torch.zeros(batch_size, 1, 0, dtype=torch.bool, device=device)  # row 0: the committed text

    def __len__(self) -> int:
        return self._seen.shape[2]

    def add(self, parents: Tensor) -> Tensor:
        """Note W more rows.

        Args:
            parents: (B, W) int64, earlier rows by their number; -1 is the committed text.

        Returns:
            (B, W, rows so far, these included) bool: what each of them sees.
        """
        batch, width = parents.shape
        sequences = torch.arange(batch, device=parents.device)[:, None]
        own = torch.eye(width, dtype=torch.bool, device=parents.device).expand(batch, -1, -1)
        visible = torch.cat([self._seen[sequences, parents + 1], own], dim=-1)
        self._seen = torch.cat([nn.functional.pad(self._seen, (0, width)), visible], dim=1)
        return visible


class SerialDrafter(Drafter):
    """Drafts depth by depth."""

    target_vocab_size: int
    """V."""

    @abstractmethod
    def first_logits(self, state: Any) -> Tensor:
        """(B, Vd) logits of the first draft; forgets what an earlier proposal simulated."""

    @abstractmethod
    def extend(self, state: Any, tokens: Tensor, parents: Tensor, depth: int) -> Tensor:
        """Read one depth of the tree.

        Args:
            state: as `first_logits` or the last `extend` left it.
            tokens: (B, W) int64, target ids.
            parents: (B, W) int64, the nodes before them, numbered in the order in which they were given; -1 is the
                committed text.
            depth: of these nodes, 1 for the first drafted token.

        Returns:
            (B, W, Vd) logits of the tokens after them.
        """

    def propose(self, state: Any, plan: DraftPlan, warp: Warp | None, generator: torch.Generator | None) -> Draft:
        """Draft a chain or a tree; see Proposer.propose."""
        if plan.kind == "chain":
            return self._chain(state, plan.num_draft_tokens, warp, generator)
        if plan.kind == "static_tree":
            return self._static_tree(state, plan, warp, generator)
        return self._dynamic_tree(state, plan)

    def _chain(self, state: Any, num_draft_tokens: int, warp: Warp | None, generator: torch.Generator | None) -> Draft:
        logits = self.first_logits(state)
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        for depth in range(1, num_draft_tokens + 1):
            if warp is None:
                choice = logits.argmax(dim=-1)
            else:
                row = warp(logits)
                choice = torch.multinomial(row, 1, generator=generator).squeeze(1)
                probs.append(self._in_target_vocabulary(row))
            tokens.append(self.draft_to_target_ids[choice])
            if depth < num_draft_tokens:
                parents = torch.full_like(choice, depth - 2)[:, None]
                logits = self.extend(state, tokens[-1][:, None], parents, depth).squeeze(1)
        return Draft(torch.stack(tokens, dim=1), torch.stack(probs, dim=1) if probs else None)

    def _static_tree(self, state: Any, plan: DraftPlan, warp: Warp | None, generator: torch.Generator | None) -> Draft:
        """Every node of depth d gets `branches[d]` children: the most likely, or drawn without replacement."""
        logits = self.first_logits(state)[:, None]  # (B, W, Vd)
        batch = len(logits)
        tokens: list[Tensor] = []
        parents: list[Tensor] = []
        probs: list[Tensor] = []
        first_parent, num_nodes = -1, 0
        for depth, branch in enumerate(plan.branches, start=1):
            width = logits.shape[1]
            if warp is None:
                choice = logits.topk(branch, dim=-1).indices  # (B, W, branch)
            else:
                row = warp(logits)
                probs.append(self._in_target_vocabulary(row))
                choice = _without_replacement(row, branch, generator)
            tokens.append(self.draft_to_target_ids[choice].flatten(1))
            above = torch.arange(first_parent, first_parent + width, device=logits.device)
            parents.append(above.repeat_interleave(branch).expand(batch, -1))
            first_parent, num_nodes = num_nodes, num_nodes + width * branch
            if depth < len(plan.branches):
                logits = self.extend(state, tokens[-1], parents[-1], depth)
        found = torch.cat(tokens, dim=1)
        drawn_from = None
        if probs:  # leaves have no children: their rows stay empty
            leaves = found.shape[1] + 1 - sum(part.shape[1] for part in probs)
            drawn_from = torch.cat([*probs, probs[0].new_zeros(batch, leaves, probs[0].shape[2])], dim=1)
        return Draft(found, drawn_from, torch.cat(parents, dim=1))

    def _dynamic_tree(self, state: Any, plan: DraftPlan) -> Draft:
        """EAGLE-2 (arXiv:2406.16858): expand the `top_k` most probable nodes of each depth by their `top_k` most likely
        tokens, then keep the `total_tokens` nodes of all depths on the most probable paths. Deterministic."""
        logits = self.first_logits(state)[:, None]
        batch = len(logits)
        score = logits.new_zeros(batch, 1, dtype=torch.float32)  # log probability of the paths to expand
        beams = torch.full((batch, 1), -1, device=logits.device)  # their nodes, as numbered by `extend`
        owners = torch.full((batch, 1), -1, device=logits.device)  # the same nodes among all that were tried
        tokens: list[Tensor] = []
        parents: list[Tensor] = []
        scores: list[Tensor] = []
        expanded, tried = 0, 0
        for depth in range(1, plan.num_draft_tokens + 1):
            top = logits.float().log_softmax(dim=-1).topk(min(plan.top_k, logits.shape[-1]), dim=-1)
            branch = top.values.shape[-1]
            tokens.append(self.draft_to_target_ids[top.indices].flatten(1))
            parents.append(owners.repeat_interleave(branch, dim=1))
            scores.append((score[..., None] + top.values).flatten(1))
            if depth == plan.num_draft_tokens:
                break
            best = scores[-1].topk(min(plan.top_k, scores[-1].shape[1]), dim=1)
            order = best.indices.sort(dim=1).values
            score = scores[-1].gather(1, order)
            above = beams.repeat_interleave(branch, dim=1).gather(1, order)
            logits = self.extend(state, tokens[-1].gather(1, order), above, depth)
            owners = order + tried
            beams = torch.arange(expanded, expanded + order.shape[1], device=order.device).expand(batch, -1)
            expanded, tried = expanded + order.shape[1], tried + tokens[-1].shape[1]
        return _prune(torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(scores, 1), plan.total_tokens)

    def _in_target_vocabulary(self, probs: Tensor) -> Tensor:
        """(..., Vd) -> (..., V): tokens that cannot be drafted have probability 0."""
        whole = probs.new_zeros(*probs.shape[:-1], self.target_vocab_size)
        return whole.index_copy_(-1, self.draft_to_target_ids, probs)


def _without_replacement(probs: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    """(..., V) -> (..., count) indices in the order drawn. Where fewer have any probability, others follow them."""
    flat = probs.flatten(0, -2)
    uniforms = torch.rand(flat.shape, generator=generator, dtype=torch.float64, device=probs.device)
    race = -uniforms.log() / flat.double()  # exponential clocks: the k-th to ring is the k-th drawn
    return race.topk(count, dim=-1, largest=False).indices.view(*probs.shape[:-1], count)


def _prune(tokens: Tensor, parents: Tensor, scores: Tensor, total: int) -> Draft:
    """Keep the `total` best nodes. A child never scores above its parent, so every kept node's parent is kept."""
    total = min(total, scores.shape[1])
    kept = scores.sort(dim=1, descending=True, stable=True).indices[:, :total].sort(dim=1).values  # (B, N)
    number = torch.full((len(scores), scores.shape[1] + 1), -1, device=scores.device)  # old -> new; last entry: root
    number.scatter_(1, kept, torch.arange(total, device=scores.device).expand_as(kept))
    above = parents.gather(1, kept)
    return Draft(tokens.gather(1, kept), None, number.gather(1, above.remainder(scores.shape[1] + 1)))
