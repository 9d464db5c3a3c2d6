"""Reading conversations: what is refused (with file and line), what is skipped, what is kept."""

import json

import pytest

from conf import InputError
from data.corpus import Conversation, CorpusConfig, read_conversations

QUESTION = {"role": "user", "content": "Why?"}
ANSWER = {"role": "assistant", "content": "Because."}
GOOD = json.dumps({"messages": [QUESTION, ANSWER]})


def corpus_of(tmp_path, *lines, max_conversations=None):
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return CorpusConfig(name="test", path=str(path), max_conversations=max_conversations)


def with_messages(*messages):
    return json.dumps({"messages": list(messages)})


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"messages": [', "invalid JSON"),
        ("[1, 2]", '"messages" list'),
        ('{"conversations": []}', '"messages" list'),
        ('{"messages": []}', '"messages" list'),
        ('{"messages": "hello"}', '"messages" list'),
        (with_messages({"role": "robot", "content": "beep"}), "message 0 has role 'robot'"),
        (with_messages(QUESTION, {"content": "no role"}), "message 1 has role None"),
        (with_messages(QUESTION, "Because."), "message 1 has role 'Because.'"),
        (with_messages(QUESTION, {"role": "assistant"}), "message 1 (assistant) has no text"),
        (with_messages({"role": "user", "content": None}, ANSWER), "message 0 (user) has no text"),
        (with_messages(QUESTION), "no assistant message"),
    ],
)
def test_bad_line_is_refused_with_file_and_line(tmp_path, line, reason):
    corpus = corpus_of(tmp_path, GOOD, "", line, GOOD)
    with pytest.raises(InputError) as error:
        read_conversations(corpus)
    assert str(error.value).startswith("chat.jsonl:3: ")
    assert reason in str(error.value)


@pytest.mark.parametrize("lines", [(), ("", "   ")])
def test_file_without_a_conversation_is_refused(tmp_path, lines):
    with pytest.raises(InputError, match=r"chat\.jsonl holds no conversation"):
        read_conversations(corpus_of(tmp_path, *lines))


def test_missing_file_is_refused(tmp_path):
    missing = CorpusConfig(name="test", path=str(tmp_path / "nowhere.jsonl"), max_conversations=None)
    with pytest.raises(InputError, match=r"nowhere\.jsonl does not exist.*corpus\.path"):
        read_conversations(missing)


def test_bytes_that_are_no_utf8_are_refused(tmp_path):
    corpus = corpus_of(tmp_path, GOOD)
    (tmp_path / "chat.jsonl").write_bytes(GOOD.encode() + b"\n" + GOOD.replace("Why", "Caf\xe9").encode("latin-1"))
    with pytest.raises(InputError, match=r"chat\.jsonl"):
        read_conversations(corpus)


def test_blank_lines_are_skipped_but_counted(tmp_path):
    found = read_conversations(corpus_of(tmp_path, "", GOOD, "  ", GOOD))
    assert [conversation.source for conversation in found] == ["chat.jsonl:2", "chat.jsonl:4"]
    assert found[0] == Conversation(messages=[QUESTION, ANSWER], source="chat.jsonl:2", cut=False)


def test_max_conversations_reads_no_further(tmp_path):
    corpus = corpus_of(tmp_path, GOOD, "", GOOD, "not JSON", max_conversations=2)
    assert [conversation.source for conversation in read_conversations(corpus)] == ["chat.jsonl:1", "chat.jsonl:3"]


def test_only_finish_reason_length_means_cut(tmp_path):
    rows = [{"messages": [QUESTION, ANSWER], "finish_reason": reason} for reason in ("length", "stop", None)]
    found = read_conversations(corpus_of(tmp_path, *map(json.dumps, rows)))
    assert [conversation.cut for conversation in found] == [True, False, False]


def test_prompt_alone_is_accepted_where_no_answer_is_required(tmp_path):
    found = read_conversations(corpus_of(tmp_path, with_messages(QUESTION)), require_answer=False)
    assert [conversation.messages for conversation in found] == [[QUESTION]]


def test_tool_call_needs_no_text(tmp_path):
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "now", "arguments": {}}}]}
    found = read_conversations(corpus_of(tmp_path, with_messages(QUESTION, call)))
    assert found[0].messages == [QUESTION, call]


def test_sample_prefix_reads_a_file_that_ships_with_the_package():
    found = read_conversations(CorpusConfig(name="test", path="sample:heldout40.jsonl", max_conversations=None))
    assert len(found) == 40
    assert (found[0].source, found[-1].source) == ("heldout40.jsonl:1", "heldout40.jsonl:40")
