"""Conversations from a jsonl file: one OpenAI-style {"messages": [...]} object per line, validated line by line."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from conf import InputError, config

ROLES = ("system", "user", "assistant", "tool")
BUILT_IN = "sample:"
"""Prefix of a path that names a file shipped in data/samples."""


@config
class CorpusConfig:
    """Where conversations come from: conf/corpus/*.yaml."""

    name: str
    """Short name, for run names and reports."""
    path: str
    """A jsonl file, or `sample:FILE` for one that ships with Outrider."""
    max_conversations: int | None = Field(ge=1)
    """Read at most so many; None reads all."""


@dataclass(frozen=True)
class Conversation:
    """One dialogue. `source` is "file:line", for messages to the user."""

    messages: list[dict[str, Any]]
    source: str
    cut: bool
    """The last answer was cut at the token limit: it has no end-of-turn token of the target's own."""
    tools: list[dict[str, Any]] | None = None
    """Tool definitions, handed to the chat template."""

    @property
    def first_prompt(self) -> list[dict[str, Any]]:
        """The messages before the first answer."""
        roles = [message["role"] for message in self.messages]
        return self.messages[: roles.index("assistant")] if "assistant" in roles else self.messages


def read_conversations(corpus: CorpusConfig, require_answer: bool = True) -> list[Conversation]:
    """Read and validate a corpus.

    Args:
        corpus: what to read.
        require_answer: every conversation must hold an assistant message (prompts for evaluation need none).

    Raises:
        InputError: naming file and line, if a line is no JSON, no conversation, or the file is empty or missing.
    """
    path = sample_path(corpus.path)
    if not path.is_file():
        raise InputError(f"corpus file {path} does not exist: give a jsonl file of conversations with corpus.path=FILE")
    conversations: list[Conversation] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if corpus.max_conversations is not None and len(conversations) == corpus.max_conversations:
                break
            if line.strip():
                conversations.append(_parse(line, f"{path.name}:{number}", require_answer))
    if not conversations:
        raise InputError(f"corpus {path} holds no conversation: one JSON object with a `messages` list per line")
    return conversations


def sample_path(path: str) -> Path:
    """The file behind `path`: `sample:FILE` is data/samples/FILE, anything else is a path."""
    if path.startswith(BUILT_IN):
        return Path(__file__).parent / "samples" / path.removeprefix(BUILT_IN)
    return Path(path).expanduser()


def _parse(line: bytes, source: str, require_answer: bool) -> Conversation:
    try:
        row = json.loads(line)
    except UnicodeDecodeError as error:
        raise InputError(f"{source}: not UTF-8 ({error.reason} at byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{source}: invalid JSON ({error.msg} at column {error.colno})") from error
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        raise InputError(f'{source}: expected an object with a non-empty "messages" list')
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            role = message.get("role") if isinstance(message, dict) else message
            raise InputError(f"{source}: message {index} has role {role!r}, expected one of {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise InputError(f"{source}: message {index} ({message['role']}) has no text in `content`")
    if require_answer and not any(message["role"] == "assistant" for message in messages):
        raise InputError(f"{source}: the conversation has no assistant message, so there is no answer to learn from")
    return Conversation(
        messages=messages, source=source, cut=row.get("finish_reason") == "length", tools=row.get("tools")
    )
