"""Prompts to measure on: a jsonl file with `messages` (ours) or `turns` (the public benchmark sets)."""

import json
from dataclasses import dataclass

from conf import InputError
from data.corpus import CorpusConfig, read_conversations, sample_path
from data.encode import Encoder


@dataclass(frozen=True)
class Prompt:
    """One prompt."""

    source: str
    """file:line."""
    input_ids: list[int]
    """Generation prompt included."""


def read_prompts(corpus: CorpusConfig, encoder: Encoder) -> list[Prompt]:
    """First turns of a prompt set: everything before the first answer of `messages`, or the first of `turns`.

    Raises:
        InputError: naming file and line, if the file holds no prompts.
    """
    path = sample_path(corpus.path)
    if path.is_file() and '"turns"' in path.open(encoding="utf-8").readline():
        questions = _read_turns(corpus)
    else:
        questions = []
        for conversation in read_conversations(corpus, require_answer=False):
            if not conversation.first_prompt:
                raise InputError(
                    f"{conversation.source}: the conversation starts with an answer; a prompt must precede"
                )
            questions.append((conversation.source, conversation.first_prompt))
    return [Prompt(source=source, input_ids=encoder.prompt_ids(messages)) for source, messages in questions]


def _read_turns(corpus: CorpusConfig) -> list[tuple[str, list[dict[str, str]]]]:
    path = sample_path(corpus.path)
    questions: list[tuple[str, list[dict[str, str]]]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if len(questions) == corpus.max_conversations or not line.strip():
            continue
        try:
            turns = json.loads(line)["turns"]
        except (json.JSONDecodeError, KeyError, TypeError):
            turns = None
        if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
            raise InputError(f'{path.name}:{number}: expected an object with a non-empty "turns" list of texts')
        questions.append((f"{path.name}:{number}", [{"role": "user", "content": turns[0]}]))
    return questions
