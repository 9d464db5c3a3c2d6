"""The frozen target: captured states against transformers' own forward pass, cached steps, identity, refusals."""

import dataclasses

import pytest
import torch

from conf import InputError
from data.batch import Wants
from data.encode import Document
from data.packing import collate
from data.target import Target, TargetConfig

FAMILIES = ["llama", "qwen3", "qwen3_moe"]
WANTS = Wants(aux_layers=(0, 1, 4, 7), last_hidden_state=True)
RELATIVE = 1e-6
"""transformers' norms compute in float32 even in a float64 model, and kernels differ with the number of rows."""


def packs_of(*lengths, width=20, seed=0):
    """One pack for each list of document lengths, with random tokens."""
    generator = torch.Generator().manual_seed(seed)
    packs = [
        [Document(torch.randint(0, 256, (n,), generator=generator).tolist(), [True] * n, "") for n in pack]
        for pack in lengths
    ]
    return collate(packs, width, [[0.0] * len(pack) for pack in packs])


def assert_close(found, expected):
    assert found.shape == expected.shape and found.dtype == expected.dtype
    assert (found - expected).norm() <= RELATIVE * expected.norm()


def whole(target, ids):
    """transformers' own (hidden_states, logits) of one sequence."""
    with torch.no_grad():
        output = target.model(input_ids=ids[None], output_hidden_states=True, use_cache=False)
    return output.hidden_states, output.logits[0]


@pytest.mark.parametrize(
    ("family", "overrides"), [*((family, {}) for family in FAMILIES), ("mistral", {"sliding_window": 6})]
)
@pytest.mark.parametrize(
    "lengths", [[(7, 1, 9)], [(6, 8), (1, 18, 1)], [(20,), (3, 4)], [(3, 2), (5,)]], ids=["one", "two", "full", "short"]
)
def test_captured_states_are_those_of_each_document_alone(tiny_target, family, overrides, lengths):
    target = tiny_target(family, torch.float64, **overrides)
    batch = packs_of(*lengths)
    features = target.capture(batch, WANTS)
    ids, aux, last = (
        batch.input_ids.flatten(),
        features.aux_hidden_states.flatten(0, 1),
        features.last_hidden_state.flatten(0, 1),
    )
    assert len(batch.document_spans()) == sum(map(len, lengths))
    for start, end in batch.document_spans():
        hidden_states, logits = whole(target, ids[start:end])
        assert_close(aux[start:end], torch.cat([hidden_states[i][0] for i in WANTS.aux_layers], dim=-1))
        assert_close(target.logits(last[start:end]), logits)  # so `last` is the state after the final norm


def test_aux_layer_i_is_the_state_that_enters_layer_i(tiny_target):
    """Independent of transformers' numbering: feed layer 3's input to layer 3, get layer 4's."""
    target = tiny_target("llama", torch.float64)
    batch = packs_of((9,), width=9)
    enters_3, enters_4 = target.capture(batch, Wants((3, 4), False)).aux_hidden_states.chunk(2, dim=-1)
    decoder = target.model.get_decoder()
    rotary = decoder.rotary_emb(enters_3, batch.position_ids)
    mask = torch.full((9, 9), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    with torch.no_grad():
        output = decoder.layers[3](enters_3, attention_mask=mask, position_embeddings=rotary)
    assert_close(output[0] if isinstance(output, tuple) else output, enters_4)


def test_target_computes_only_what_is_wanted(tiny_target):
    target, batch = tiny_target(), packs_of((5,), width=5)
    features = target.capture(batch, Wants((2,), last_hidden_state=False))
    assert features.last_hidden_state is None
    assert features.aux_hidden_states.shape == (1, 5, 32)
    assert target.capture(batch, Wants((), True)).aux_hidden_states.shape == (1, 5, 0)
    assert not any(layer._forward_pre_hooks for layer in target.parts.decoder.layers)


def test_captured_states_can_be_saved_for_backward_and_need_no_gradient(tiny_target):
    target = tiny_target()
    features = target.capture(packs_of((5,), width=5), WANTS)
    for state in (features.aux_hidden_states, features.last_hidden_state):
        assert not state.requires_grad and not state.is_inference()
    assert not any(parameter.requires_grad for parameter in target.model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_steps_with_crops_equal_one_forward_pass(tiny_target, family):
    target = tiny_target(family, torch.float64)
    ids = packs_of((14,), width=14).input_ids
    cache = target.new_cache(1, 20)
    lasts, states = [], []

    def read(tokens, keep):
        last, features = target.step(tokens, cache, WANTS)
        lasts.append(last[:, :keep])
        states.append(features.aux_hidden_states[:, :keep])
        cache.commit(torch.tensor([keep]))

    wrong = (ids + 1) % 256
    read(ids[:, :5], 5)
    read(torch.cat([ids[:, 5:6], wrong[:, 6:9]], dim=1), 1)  # three drafts, all rejected
    read(torch.cat([ids[:, 6:9], wrong[:, 9:10]], dim=1), 3)  # two kept, one rejected
    read(ids[:, 9:10], 1)
    read(ids[:, 10:14], 4)
    hidden_states, logits = whole(target, ids[0])
    assert_close(torch.cat(states, dim=1)[0], torch.cat([hidden_states[i][0] for i in WANTS.aux_layers], dim=-1))
    assert_close(target.logits(torch.cat(lasts, dim=1)[0]), logits)


FIELDS = ["architecture", "hidden_size", "num_hidden_layers", "vocab_size", "tokenizer_sha256", "weights_sha256"]


@pytest.mark.parametrize("field", FIELDS)
def test_identity_that_differs_is_refused_naming_the_field(tiny_target, field):
    identity = tiny_target().identity()
    other = dataclasses.replace(identity, **{field: "other"})
    with pytest.raises(InputError, match=rf"{field} .*tiny-llama has {field} other"):
        identity.require(other)


def test_identity_ignores_name_path_and_dtype_and_tells_weights_apart(tiny_target):
    identity = tiny_target().identity()
    moved = dataclasses.replace(
        tiny_target(dtype=torch.bfloat16).identity(), name="moved", path="/elsewhere", revision="v2"
    )
    identity.require(moved)
    with pytest.raises(InputError, match="weights_sha256"):
        identity.require(tiny_target(seed=1).identity())


def test_identity_tells_chat_templates_apart(tiny_target):
    target = tiny_target()
    before = target.identity()
    target.tokenizer.chat_template += " "
    with pytest.raises(InputError, match="tokenizer_sha256"):
        before.require(target.identity())


def test_unknown_path_is_refused_naming_the_option(monkeypatch):
    def unreachable(*_arguments, **_keywords):
        raise OSError("no network")

    monkeypatch.setattr("data.target.AutoConfig.from_pretrained", unreachable)
    settings = TargetConfig(
        name="lost", path="nobody/nothing", revision=None, dtype="float32", chat_template_kwargs={},
        trust_remote_code=False, compile=False,
    )  # fmt: skip
    with pytest.raises(InputError, match=r"target lost: 'nobody/nothing' .*target\.path=FOLDER"):
        Target(settings)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("gemma3_text", {"final_logit_softcapping": 3.0}),
        ("gemma3_text", {"final_logit_softcapping": 30.0}),
        ("granite", {"logits_scaling": 4.0}),
    ],
)  # fmt: skip
def test_target_that_scales_or_caps_its_logits_is_refused(tiny_target, family, overrides):
    with pytest.raises(InputError, match=r"more than its lm_head"):
        tiny_target(family, **overrides)


def test_gemma2_is_refused_in_one_sentence(tiny_target):
    with pytest.raises(InputError):
        tiny_target("gemma2")


def test_every_end_of_turn_token_is_known(tiny_target):
    target = tiny_target()
    assert target.eos_token_ids == {257}
    target.model.generation_config.eos_token_id = [3, 5]
    assert target.eos_token_ids == {3, 5, 257}


def test_layers_after_the_last_wanted_one_do_not_run(tiny_target):
    """Where no last hidden state is wanted; the states are the same."""
    target = tiny_target("llama")
    batch, ran = packs_of((9,), width=9), []
    handles = [
        layer.register_forward_hook(lambda *_, index=index: ran.append(index))
        for index, layer in enumerate(target.parts.decoder.layers)
    ]
    early = target.capture(batch, Wants((1, 4), False))
    assert ran == [0, 1, 2, 3] and early.last_hidden_state is None  # the state that enters layer 4 leaves layer 3
    ran.clear()
    late = target.capture(batch, Wants((1, 4), True))
    assert ran == list(range(8))
    assert torch.equal(early.aux_hidden_states, late.aux_hidden_states)
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_final_norm_is_what_the_state_is_multiplied_with(tiny_target, family):
    """Gemma stores 1 less."""
    target = tiny_target(family)
    norm = target.decoder.module.norm
    with torch.no_grad():
        norm.weight.add_(0.3 * torch.rand(32))
        x = 100 * torch.randn(5, 32)  # so large that the norm's epsilon does not count
        assert_close(norm(x), x / x.square().mean(-1, keepdim=True).sqrt() * target.parts.final_norm)
