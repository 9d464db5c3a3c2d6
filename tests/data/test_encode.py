"""The loss mask: exactly the tokens that the target generated, read off its own chat template."""

from itertools import groupby

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from conf import InputError
from data.corpus import Conversation
from data.encode import Encoder

HEADER = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
GENERATION = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
DROPS_EARLIER_THINKING = (
    HEADER + "{% if message['role'] == 'assistant' and not loop.last %}{{ message['content'].split('</think>')[-1] }}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}" + GENERATION
)
OPENS_THINKING_IN_PROMPT_ONLY = (
    HEADER + "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>' }}{% endif %}"
)
SWITCHED = HEADER + "{{ message['content'] + mark + '<|im_end|>\n' }}{% endfor %}" + GENERATION


@pytest.fixture
def tokenizer(tiny_folder):
    return AutoTokenizer.from_pretrained(tiny_folder())


@pytest.fixture
def encoder(tokenizer):
    return Encoder(tokenizer, frozenset({tokenizer.eos_token_id}), {}, max_tokens=400)


def dialogue(*texts, cut=False, roles=("user", "assistant")):
    messages = [{"role": roles[i % len(roles)], "content": text} for i, text in enumerate(texts)]
    return Conversation(messages=messages, source="chat.jsonl:7", cut=cut)


def runs(document, tokenizer):
    """[(supervised?, text)] of each run of equal mask values."""
    pairs = zip(document.loss_mask, document.input_ids, strict=True)
    return [(flag, tokenizer.decode([token for _, token in run])) for flag, run in groupby(pairs, lambda pair: pair[0])]


def test_mask_covers_the_answer_with_its_end_of_turn_and_not_the_newline_after_it(encoder, tokenizer):
    (document,) = encoder.encode(dialogue("Hi", "Hello"))
    assert runs(document, tokenizer) == [
        (False, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
        (True, "Hello<|im_end|>"),
        (False, "\n"),
    ]


def test_every_answer_of_a_dialogue_is_supervised(encoder, tokenizer):
    (document,) = encoder.encode(dialogue("Hi", "Hello", "Go on", "No"))
    assert runs(document, tokenizer) == [
        (False, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
        (True, "Hello<|im_end|>"),
        (False, "\n<|im_start|>user\nGo on<|im_end|>\n<|im_start|>assistant\n"),
        (True, "No<|im_end|>"),
        (False, "\n"),
    ]


def test_messages_that_follow_an_answer_without_a_user_turn_are_prompt(encoder, tokenizer):
    (document,) = encoder.encode(
        dialogue("q", "call", "result", "done", roles=("user", "assistant", "tool", "assistant"))
    )
    assert [text for supervised, text in runs(document, tokenizer) if supervised] == [
        "call<|im_end|>",
        "done<|im_end|>",
    ]


def test_cut_answer_has_no_end_of_turn(encoder, tokenizer):
    (document,) = encoder.encode(dialogue("Hi", "Hello", "Go on", "and then", cut=True))
    assert runs(document, tokenizer)[1] == (True, "Hello<|im_end|>")  # only the last answer was cut
    assert runs(document, tokenizer)[-1] == (True, "and then")
    assert tokenizer.eos_token_id != document.input_ids[-1]


def test_document_starts_with_what_serving_would_read(encoder):
    conversation = dialogue("Hi", "Hello")
    (document,) = encoder.encode(conversation)
    prompt = encoder.prompt_ids(conversation.messages[:1])
    assert document.input_ids[: len(prompt)] == prompt
    assert document.loss_mask.index(True) == len(prompt)


def test_answer_is_tokenised_apart_from_its_prompt():
    """The tokenizer below merges newline + H; the target, generating after the newline, cannot write that token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate([*letters, "ĊH"])}
    rules = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ċ", "H")]))
    rules.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rules.add_special_tokens(["<|end|>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=rules,
        eos_token="<|end|>",
        chat_template="{% for m in messages %}{{ m['role'] + '\n' + m['content'] + '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}",
    )
    assert vocabulary["ĊH"] in tokenizer("user\nHi")["input_ids"]
    encoder = Encoder(tokenizer, frozenset({tokenizer.eos_token_id}), {}, max_tokens=99)
    (document,) = encoder.encode(dialogue("x", "Hi"))
    supervised = [token for token, flag in zip(document.input_ids, document.loss_mask, strict=True) if flag]
    assert supervised == [vocabulary["H"], vocabulary["i"], tokenizer.eos_token_id]
    assert document.input_ids[-4] == vocabulary["Ċ"]


@pytest.mark.parametrize(
    ("template", "covered"),
    [
        ("{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}", "no token"),
        ("{% for m in messages if m['role'] == 'assistant' %}{{ m['content'] }}{% endfor %}", "every token"),
    ],
)
def test_degenerate_mask_is_refused_naming_the_conversation(encoder, tokenizer, template, covered):
    tokenizer.chat_template = template
    with pytest.raises(InputError, match=rf"^chat\.jsonl:7: the loss mask covers {covered}"):
        encoder.encode(dialogue("Hi", "Hello"))


def test_cut_answer_without_a_single_token_is_refused(encoder):
    with pytest.raises(InputError, match=r"^chat\.jsonl:7: the loss mask covers no token"):
        encoder.encode(dialogue("Hi", "", cut=True))


def test_document_longer_than_max_tokens_is_refused_and_never_cut(tokenizer):
    eos = frozenset({tokenizer.eos_token_id})
    # <|im_start|>user\n Hi <|im_end|>\n <|im_start|>assistant\n Hello <|im_end|>\n
    length = (1 + 5) + 2 + 2 + (1 + 10) + 5 + 2
    (document,) = Encoder(tokenizer, eos, {}, max_tokens=length).encode(dialogue("Hi", "Hello"))
    assert len(document) == length
    with pytest.raises(InputError, match=rf"^chat\.jsonl:7: {length} tokens, more than data\.max_tokens={length - 1}"):
        Encoder(tokenizer, eos, {}, max_tokens=length - 1).encode(dialogue("Hi", "Hello"))


def test_rewritten_history_gives_one_document_per_answer(encoder, tokenizer):
    tokenizer.chat_template = DROPS_EARLIER_THINKING
    first, second = encoder.encode(dialogue("Hi", "<think>hm</think>Hello", "Go on", "<think>so</think>No"))
    assert runs(first, tokenizer) == [
        (False, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
        (True, "<think>hm</think>Hello<|im_end|>"),
        (False, "\n"),
    ]
    assert runs(second, tokenizer) == [
        (
            False,
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
            "<|im_start|>user\nGo on<|im_end|>\n<|im_start|>assistant\n",
        ),
        (True, "<think>so</think>No<|im_end|>"),
        (False, "\n"),
    ]


def test_template_that_does_not_continue_its_own_prompt_is_refused(encoder, tokenizer):
    tokenizer.chat_template = OPENS_THINKING_IN_PROMPT_ONLY
    with pytest.raises(InputError, match=r"^chat\.jsonl:7: .* generation prompt at message 1.*chat_template_kwargs"):
        encoder.encode(dialogue("Hi", "Hello"))


def test_conversation_that_starts_with_an_answer_is_refused(encoder):
    with pytest.raises(InputError, match=r"^chat\.jsonl:7: .*starts with an answer"):
        encoder.encode(dialogue("Hello", "Hi", roles=("assistant", "user")))


def test_tokenizer_without_chat_template_is_refused(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(InputError, match="no chat template"):
        Encoder(tokenizer, frozenset({257}), {}, max_tokens=99)


def test_template_kwargs_reach_the_template(tokenizer):
    tokenizer.chat_template = SWITCHED
    encoder = Encoder(tokenizer, frozenset({tokenizer.eos_token_id}), {"mark": "!"}, max_tokens=99)
    (document,) = encoder.encode(dialogue("Hi", "Hello"))
    assert runs(document, tokenizer)[1] == (True, "Hello!<|im_end|>")
