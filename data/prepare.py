"""From a corpus to what training needs: encoded documents, held-out prompts, a draft vocabulary."""

from dataclasses import dataclass

import torch
from torch import Tensor

from conf import InputError
from data.corpus import CorpusConfig, read_conversations
from data.encode import Document, Encoder
from data.target import Target
from data.vocab import choose_draft_vocabulary


@dataclass(frozen=True)
class PreparedCorpus:
    """One corpus, encoded for one target."""

    train: list[Document]
    validation_prompts: list[list[int]]
    """Token ids of held-out prompts, generation prompt included."""

    def draft_vocabulary(self, target: Target, size: int | None) -> Tensor:
        """draft_to_target_ids (Vd,) int64; every target id where `size` is None."""
        if size is None:
            return torch.arange(target.hf_config.vocab_size)
        special = {*target.tokenizer.all_special_ids, *target.eos_token_ids}
        return choose_draft_vocabulary(self.train, special, size, target.hf_config.vocab_size)


def make_encoder(target: Target, max_tokens: int) -> Encoder:
    """An encoder for `target`.

    Raises:
        InputError: if `max_tokens` exceeds the target's context.
    """
    context = target.hf_config.max_position_embeddings
    if max_tokens > context:
        raise InputError(f"data.max_tokens={max_tokens} is longer than the target's context of {context} tokens")
    template_kwargs = target.target_config.chat_template_kwargs
    return Encoder(target.tokenizer, target.eos_token_ids, template_kwargs, max_tokens)


def prepare(target: Target, corpus: CorpusConfig, max_tokens: int, num_validation: int, seed: int) -> PreparedCorpus:
    """Read, encode and split a corpus.

    Args:
        target: gives tokenizer, chat template and context length.
        corpus: what to read.
        max_tokens: longest document.
        num_validation: conversations to hold out, chosen by `seed`.
        seed: of the choice.

    Raises:
        InputError: for anything wrong with the corpus, naming file and line.
    """
    conversations = read_conversations(corpus)
    if num_validation >= len(conversations):
        raise InputError(
            f"validation_conversations={num_validation} leaves nothing to train on: the corpus holds "
            f"{len(conversations)}; hold out fewer (0 switches validation off)"
        )
    encoder = make_encoder(target, max_tokens)
    order = torch.randperm(len(conversations), generator=torch.Generator().manual_seed(seed)).tolist()
    held_out = set(order[:num_validation])
    train = [
        document
        for index, conversation in enumerate(conversations)
        if index not in held_out
        for document in encoder.encode(conversation)
    ]
    prompts = [encoder.prompt_ids(conversations[index].first_prompt) for index in order[:num_validation]]
    return PreparedCorpus(train=train, validation_prompts=prompts)
