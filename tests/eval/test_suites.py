"""Prompt sets: `messages` and `turns` files become the token ids that serving starts from."""

import json
from pathlib import Path
from typing import Any

import pytest

from conf import InputError
from data.corpus import CorpusConfig
from data.encode import Encoder
from eval.suites import Prompt, read_prompts

START, END = 256, 257
"""Ids of the chat markers; every other token is one byte."""


@pytest.fixture(scope="module")
def encoder(tiny_target: Any) -> Encoder:
    target = tiny_target()
    return Encoder(target.tokenizer, target.eos_token_ids, {}, 512)


def corpus(path: Path, max_conversations: int | None = None) -> CorpusConfig:
    return CorpusConfig(name="test", path=str(path), max_conversations=max_conversations)


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def ids(encoder: Encoder, text: str) -> list[int]:
    """The byte tokenizer by hand: <|im_start|> and <|im_end|> around bytes."""
    vocabulary = encoder.tokenizer.get_vocab()
    spelled = text.replace(" ", "Ġ").replace("\n", "Ċ")  # how byte-level vocabularies write these bytes
    out = []
    for part in spelled.replace("[", "\0[").replace("]", "]\0").split("\0"):
        out += [{"[S]": START, "[E]": END}[part]] if part in ("[S]", "[E]") else [vocabulary[letter] for letter in part]
    return out


def test_messages_are_cut_before_the_first_answer(encoder: Encoder, tmp_path: Path) -> None:
    question = [message("system", "Be brief"), message("user", "Hi you")]
    file = write(
        tmp_path / "p.jsonl",
        {"messages": [*question, message("assistant", "No"), message("user", "Why"), message("assistant", "So")]},
        {"messages": question[1:]},
    )
    first = ids(encoder, "[S]system\nBe brief[E]\n[S]user\nHi you[E]\n[S]assistant\n")
    second = ids(encoder, "[S]user\nHi you[E]\n[S]assistant\n")
    assert read_prompts(corpus(file), encoder) == [Prompt("p.jsonl:1", first), Prompt("p.jsonl:2", second)]


def test_turns_give_their_first_question(encoder: Encoder, tmp_path: Path) -> None:
    file = write(
        tmp_path / "t.jsonl",
        {"question_id": 1, "category": "math", "turns": ["Add one", "Add two"]},
        {"question_id": 2, "turns": ["Sum"]},
    )
    assert read_prompts(corpus(file), encoder) == [
        Prompt("t.jsonl:1", ids(encoder, "[S]user\nAdd one[E]\n[S]assistant\n")),
        Prompt("t.jsonl:2", ids(encoder, "[S]user\nSum[E]\n[S]assistant\n")),
    ]


def test_messages_that_mention_turns_are_still_messages(encoder: Encoder, tmp_path: Path) -> None:
    file = write(tmp_path / "p.jsonl", {"messages": [message("user", 'the key "turns" here')]})
    assert len(read_prompts(corpus(file), encoder)) == 1


@pytest.mark.parametrize("key", ["messages", "turns"])
def test_max_conversations_limits_both_formats(encoder: Encoder, tmp_path: Path, key: str) -> None:
    rows = [{key: [message("user", f"q{i}")] if key == "messages" else [f"q{i}"]} for i in range(5)]
    prompts = read_prompts(corpus(write(tmp_path / "p.jsonl", *rows), 2), encoder)
    assert [prompt.source for prompt in prompts] == ["p.jsonl:1", "p.jsonl:2"]


def test_the_built_in_prompts_can_be_read(encoder: Encoder) -> None:
    prompts = read_prompts(CorpusConfig(name="h", path="sample:heldout40.jsonl", max_conversations=None), encoder)
    assert len(prompts) == 40
    assert len({tuple(prompt.input_ids) for prompt in prompts}) == 40
    tail = ids(encoder, "[S]assistant\n")
    assert all(prompt.input_ids[-len(tail) :] == tail and prompt.input_ids[0] == START for prompt in prompts)


@pytest.mark.parametrize(
    "second_line",
    ["{not json", "[]", '"turns"', "7", "null", {"turns": []}, {"turns": None}, {"question": "x"}, {"turns": {"a": 1}}],
)
def test_a_wrong_line_of_turns_is_named(encoder: Encoder, tmp_path: Path, second_line: Any) -> None:
    file = write(tmp_path / "t.jsonl", {"turns": ["fine"]}, second_line)
    with pytest.raises(InputError, match=r't\.jsonl:2: expected an object with a non-empty "turns" list'):
        read_prompts(corpus(file), encoder)


@pytest.mark.parametrize("turns", ["a question", [{"content": "a question"}], [None]])
def test_turns_that_are_no_list_of_texts_are_refused(encoder: Encoder, tmp_path: Path, turns: Any) -> None:
    file = write(tmp_path / "t.jsonl", {"turns": ["fine"]}, {"turns": turns})
    with pytest.raises(InputError, match=r"t\.jsonl:2"):
        read_prompts(corpus(file), encoder)


@pytest.mark.parametrize("second_line", ["{not json", {"messages": []}, {"messages": [message("robot", "x")]}])
def test_a_wrong_line_of_messages_is_named(encoder: Encoder, tmp_path: Path, second_line: Any) -> None:
    file = write(tmp_path / "p.jsonl", {"messages": [message("user", "fine")]}, second_line)
    with pytest.raises(InputError, match=r"p\.jsonl:2: "):
        read_prompts(corpus(file), encoder)


def test_a_conversation_that_starts_with_an_answer_is_no_prompt(encoder: Encoder, tmp_path: Path) -> None:
    file = write(tmp_path / "p.jsonl", {"messages": [message("assistant", "Hello"), message("user", "Hi")]})
    with pytest.raises(InputError, match=r"p\.jsonl:1"):
        read_prompts(corpus(file), encoder)


def test_missing_and_empty_files_are_named(encoder: Encoder, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.jsonl does not exist"):
        read_prompts(corpus(tmp_path / "nowhere.jsonl"), encoder)
    with pytest.raises(InputError, match=r"empty\.jsonl holds no conversation"):
        read_prompts(corpus(write(tmp_path / "empty.jsonl")), encoder)
