"""The target's own greedy answers: the text on which acceptance is measured.

A corpus may hold sampled or foreign answers; serving at T=0 runs on the target's greedy text, so validation does too.
"""

from collections.abc import Sequence

import torch
from transformers import DynamicCache

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
    for start in range(0, len(prompts), BATCH):
        group = prompts[start : start + BATCH]
        width = max(map(len, group))
        ids = torch.zeros(len(group), width, dtype=torch.int64, device=target.device)
        attended = torch.zeros_like(ids)
        for row, prompt in enumerate(group):  # padding on the left, so that all answers start in one column
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            attended[row, width - len(prompt) :] = 1
        output = target.model.generate(
            input_ids=ids,
            attention_mask=attended,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            cache=DynamicCache(config=target.hf_config),
            pad_token_id=min(target.eos_token_ids, default=0),
        )
        for prompt, answer in zip(group, output[:, width:].tolist(), strict=True):
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
