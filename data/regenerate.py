"""The target's own greedy answers: the text on which acceptance is measured.

A corpus may hold sampled or foreign answers; serving at T=0 runs on the target's greedy text, so validation does too.
"""

from collections.abc import Sequence

import torch

from data.batch import Wants, last_rows, padded
from data.encode import Document
from data.target import Target

BATCH = 16
"""Prompts answered at once."""


@torch.inference_mode()
def greedy_answers(target: Target, prompts: Sequence[list[int]], max_new_tokens: int) -> list[Document]:
    """Let the target answer `prompts` greedily.

    Args:
        target: the frozen model.
        prompts: token ids, generation prompt included.
        max_new_tokens: per answer; an answer also ends with the target's end-of-turn token.

    Returns:
        One document per prompt, loss_mask True on the generated tokens, in the order of the prompts.
    """
    documents: list[Document] = []
    eos = torch.tensor(sorted(target.eos_token_ids), device=target.device)
    wants = Wants(aux_layers=(), last_hidden_state=False)
    for start in range(0, len(prompts), BATCH):
        group = prompts[start : start + BATCH]
        lengths = torch.tensor([len(prompt) for prompt in group], device=target.device)
        cache = target.new_cache(len(group), int(lengths.max()) + max_new_tokens)
        last, _ = target.step(padded(group, target.device), cache, wants)
        cache.commit(lengths)
        token = target.logits(last_rows(last, lengths)).argmax(dim=-1)
        columns = [token]
        ended = torch.isin(token, eos)
        while len(columns) < max_new_tokens and not bool(ended.all()):
            last, _ = target.step(token[:, None], cache, wants)
            cache.commit(torch.ones_like(lengths))
            token = target.logits(last[:, 0]).argmax(dim=-1)
            columns.append(token)
            ended |= torch.isin(token, eos)
        for prompt, answer in zip(group, torch.stack(columns, dim=1).tolist(), strict=True):
            generated = _until_end_of_turn(answer, target.eos_token_ids)
            documents.append(
                Document(
                    input_ids=prompt + generated,
                    loss_mask=[False] * len(prompt) + [True] * len(generated),
                    source="greedy answer",
                )
            )
    return documents


def _until_end_of_turn(answer: list[int], eos_token_ids: frozenset[int]) -> list[int]:
    for position, token in enumerate(answer):
        if token in eos_token_ids:
            return answer[: position + 1]
    return answer
