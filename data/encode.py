"""Conversations -> token ids and the mask of what the target generated.

The mask comes from the target's own chat template: the text that the template adds when an answer is appended to the
prompt *is* what the target wrote. Prompt and answer are tokenised apart, as they are in serving, where the prompt is
tokenised and the answer is generated token by token.
"""

from dataclasses import dataclass
from typing import Any

from conf import InputError
from data.corpus import Conversation


@dataclass(frozen=True)
class Document:
    """One training sequence."""

    input_ids: list[int]
    loss_mask: list[bool]
    """True exactly where the target generated the token, its end-of-turn token included."""
    source: str

    def __len__(self) -> int:
        return len(self.input_ids)


class Encoder:
    """Turns conversations into documents with one tokenizer and chat template."""

    def __init__(
        self, tokenizer: Any, eos_token_ids: frozenset[int], template_kwargs: dict[str, Any], max_tokens: int
    ) -> None:
        """Prepare.

        Args:
            tokenizer: a Hugging Face tokenizer with a chat template.
            eos_token_ids: the tokens that end an answer.
            template_kwargs: passed to the chat template.
            max_tokens: longest document allowed; longer ones are an error, never silently cut.

        Raises:
            InputError: if the tokenizer has no chat template.
        """
        if not tokenizer.chat_template:
            raise InputError("the target's tokenizer has no chat template, so answers cannot be told from prompts")
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.template_kwargs = template_kwargs
        self.max_tokens = max_tokens

    def prompt_ids(self, messages: list[dict[str, Any]]) -> list[int]:
        """Token ids of the conversation so far and the generation prompt: what serving starts from."""
        return self._tokens(self._render(messages, add_generation_prompt=True, tools=None))

    def encode(self, conversation: Conversation) -> list[Document]:
        """One document, or one per answer where the template rewrites history (e.g. drops earlier thinking).

        Raises:
            InputError: naming the conversation, if its mask would be all False or all True, it is too long, or the
                template does not continue its own prompt.
        """
        turns = self._turns(conversation)
        documents = []
        ids: list[int] = []
        mask: list[bool] = []
        text = ""
        for prompt, answer in turns:
            if not prompt.startswith(text):  # history was rewritten: what came before is a document of its own
                documents.append(self._document(ids, mask, conversation.source))
                ids, mask, text = [], [], ""
            new_prompt = self._tokens(prompt[len(text) :])
            generated, rest = self._split_answer(answer)
            if conversation.cut and (prompt, answer) == turns[-1]:
                generated, rest = self._without_end_of_turn(generated), []
            ids += new_prompt + generated + rest
            mask += [False] * len(new_prompt) + [True] * len(generated) + [False] * len(rest)
            text = prompt + answer
        documents.append(self._document(ids, mask, conversation.source))
        return documents

    def _turns(self, conversation: Conversation) -> list[tuple[str, str]]:
        """(prompt text, text that the answer adds) of each assistant message."""
        turns = []
        for index, message in enumerate(conversation.messages):
            if message["role"] != "assistant":
                continue
            if index == 0:
                raise InputError(
                    f"{conversation.source}: the conversation starts with an answer; a prompt must precede"
                )
            before, after = conversation.messages[:index], conversation.messages[: index + 1]
            prompt = self._render(before, add_generation_prompt=True, tools=conversation.tools)
            whole = self._render(after, add_generation_prompt=False, tools=conversation.tools)
            if not whole.startswith(prompt):
                raise InputError(
                    f"{conversation.source}: the chat template does not continue its own generation prompt at message "
                    f"{index}; check target.chat_template_kwargs (Qwen3 needs enable_thinking: false)"
                )
            turns.append((prompt, whole[len(prompt) :]))
        return turns

    def _split_answer(self, answer: str) -> tuple[list[int], list[int]]:
        """What the target generated (up to its end-of-turn token) and what only the template adds after it."""
        tokens = self._tokens(answer)
        ends = [position for position, token in enumerate(tokens) if token in self.eos_token_ids]
        if not ends:
            return tokens, []
        return tokens[: ends[-1] + 1], tokens[ends[-1] + 1 :]

    def _without_end_of_turn(self, generated: list[int]) -> list[int]:
        return generated[:-1] if generated and generated[-1] in self.eos_token_ids else generated

    def _document(self, ids: list[int], mask: list[bool], source: str) -> Document:
        if all(mask) or not any(mask):
            covered = "every token" if mask and all(mask) else "no token"
            raise InputError(f"{source}: the loss mask covers {covered}; the conversation cannot be learned from")
        if len(ids) > self.max_tokens:
            raise InputError(
                f"{source}: {len(ids)} tokens, more than data.max_tokens={self.max_tokens}: "
                "raise it (up to the target's context), or leave the conversation out"
            )
        return Document(input_ids=ids, loss_mask=mask, source=source)

    def _render(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool, tools: list[dict[str, Any]] | None
    ) -> str:
        text: str = self.tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt, **self.template_kwargs
        )
        return text

    def _tokens(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids
