"""EAGLE-3 against its recipe written as loops and against its own decoder; what is trained, copied and saved."""

import dataclasses
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import one_hot, silu

from data.batch import TargetFeatures
from data.encode import Document
from data.packing import answer_weights, collate
from train.drafters.base import chain
from train.drafters.eagle3 import default_aux_layers

VARIANTS = [
    {},
    {"fc_norm": True},
    {"norm_output": True},
    {"norm_before_residual": True},
    {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
    {"qk_norm": True},
    {"row_keep_ratio": 0.6},
]


def name_of(variant):
    return "+".join(variant) or "plain"


def batch_of(*packs, width=None, seed=0):
    """Packs of documents, each (prompt tokens, answer tokens, prompt tokens, ...), with random ids."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for pack in packs:
        documents = []
        for runs in pack:
            mask = [bool(i % 2) for i, run in enumerate(runs) for _ in range(run)]
            documents.append(Document(torch.randint(0, 256, (len(mask),), generator=generator).tolist(), mask, "test"))
        made.append(documents)
    width = width or max(sum(map(len, pack)) for pack in made)
    seeds = [[10 * pack + index for index in range(len(documents))] for pack, documents in enumerate(made)]
    return collate(made, width, answer_weights(made, "token"), seeds)


def noise_features(batch):
    generator = torch.Generator().manual_seed(0)
    return TargetFeatures(torch.randn(*batch.input_ids.shape, 96, generator=generator, dtype=torch.float64), None)


def assert_relative(found, expected, limit=1e-6):
    assert found.shape == expected.shape
    assert (found.double() - expected.double()).norm() <= limit * expected.double().norm()


def rms(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turn(x, positions, theta):
    """(rows, heads, E): dimensions i and i + E/2 turned by position * theta ** (-2 i / E)."""
    half = x.shape[-1] // 2
    angles = (positions[:, None] * theta ** (-torch.arange(half, dtype=torch.float64) / half))[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


def attend(query, keys, values):
    """Row t, step k = len(keys) - 1: step-0 keys of rows <= t, and its own keys of steps 1..k."""
    out = torch.zeros_like(query)
    for t in range(len(query)):
        for head in range(query.shape[1]):
            group = head * keys[0].shape[1] // query.shape[1]
            own = [(part[0][: t + 1, group], *(step[t : t + 1, group] for step in part[1:])) for part in (keys, values)]
            scores = torch.cat(own[0]) @ query[t, head] / query.shape[-1] ** 0.5
            out[t, head] = scores.softmax(0) @ torch.cat(own[1])
    return out.flatten(1)


def recipe_streams(drafter, w, ids, aux, steps):
    """Step k's output stream at rows t with x_{t+1+k} in the document; recipes.md 2.2."""
    shape, options, eps = drafter.shape, drafter.settings, drafter.shape.rms_norm_eps
    heads = {"q": shape.num_attention_heads, "k": shape.num_key_value_heads, "v": shape.num_key_value_heads}
    parts = aux.chunk(3, dim=-1)
    if options.fc_norm:
        parts = [rms(part, w[f"fc_norm.{i}"], eps) for i, part in enumerate(parts)]
    g = torch.cat(parts, dim=-1) @ w["fc"].T
    keys, values, streams = [], [], []
    for step in range(steps):
        rows = len(ids) - 1 - step
        g = g[:rows]
        e = rms(drafter.embed_tokens.double()[ids[1 + step :]], w["input_layernorm"], eps)
        r = rms(g, w["hidden_norm"], eps)
        projected = {
            name: (torch.cat([e, r], -1) @ w[f"{name}_proj"].T).unflatten(-1, (n, -1)) for name, n in heads.items()
        }
        if options.qk_norm:
            projected |= {name: rms(projected[name], w[f"{name}_norm"], eps) for name in "qk"}
        positions, theta = torch.arange(rows) + step, shape.rope_parameters["rope_theta"]
        keys.append(turn(projected["k"], positions, theta))
        values.append(projected["v"])
        mixed = attend(turn(projected["q"], positions, theta), keys, values)
        y = (r if options.norm_before_residual else g) + mixed @ w["o_proj"].T
        m = rms(y, w["post_attention_layernorm"], eps)
        m = silu(m @ w["gate_proj"].T) * (m @ w["up_proj"].T)
        y = y + m @ w["down_proj"].T
        streams.append(y)
        g = rms(y, w["norm"], eps) if options.norm_output else y
    return streams


def recipe_loss(drafter, w, batch, features):
    """Loss of each step: KL to p_{t+1+k} on the draft vocabulary where x_{t+1}..x_{t+2+k} are one answer."""
    tensors = (batch.input_ids, batch.loss_mask, batch.token_weights, batch.uniforms, features.aux_hidden_states,
               features.last_hidden_state)  # fmt: skip
    keep = drafter.settings.row_keep_ratio
    losses = [0.0] * drafter.settings.ttt_steps
    for start, end in batch.document_spans():
        ids, mask, weights, uniforms, aux, last = (tensor.flatten(0, 1)[start:end] for tensor in tensors)
        teacher = (last.double() @ drafter.target_head.double().T)[:, drafter.draft_to_target_ids].log_softmax(-1)
        for step, stream in enumerate(recipe_streams(drafter, w, ids, aux.double(), len(losses))):
            student = (rms(stream, w["norm"], drafter.shape.rms_norm_eps) @ w["lm_head"].T).log_softmax(-1)
            for t in range(len(ids) - 2 - step):
                if mask[t + 1 : t + 3 + step].all() and uniforms[t] < keep**step:
                    log_p, log_q = teacher[t + 1 + step], student[t]
                    losses[step] += weights[t + 2 + step].double() / keep**step * (log_p.exp() * (log_p - log_q)).sum()
    return torch.stack(losses)


def short(name):
    return name.removeprefix("midlayer.").removeprefix("self_attn.").removeprefix("mlp.").removesuffix(".weight")


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_loss_and_gradients_are_those_of_the_recipe(tiny_target, tiny_drafter, variant):
    target = tiny_target("llama", torch.float64)
    drafter = tiny_drafter(target, draft_vocab_size=90, step_loss_decay=0.7, **variant)
    batch = batch_of([(3, 5), (1, 3, 1, 4)], [(2, 6, 2)], width=19)
    features = target.capture(batch, drafter.wants)
    result = drafter.loss(batch, features)
    result.loss.backward()
    w = {short(name): parameter.detach().double().requires_grad_() for name, parameter in drafter.named_parameters()}
    expected = recipe_loss(drafter, w, batch, features)
    total = (expected * torch.tensor([1, 0.7, 0.49], dtype=torch.float64)).sum()
    total.backward()
    assert_relative(result.step_losses, expected.detach())
    assert_relative(result.loss.detach(), total.detach())
    for name, parameter in drafter.named_parameters():
        assert_relative(parameter.grad, w[short(name)].grad)  # the loss itself is always computed in float32


def logits_at(drafter, batch, features, steps):
    """(K, R, Vd) of the training path."""
    with torch.no_grad():
        everywhere = [torch.arange(batch.input_ids.numel())] * steps
        return drafter.lm_head(drafter.norm(torch.stack(drafter._unroll(batch, features, everywhere))))


def rows_of(features, start, end):
    return features.select(torch.arange(start, end)[None])


class Remember:
    """A warp that draws the argmax and keeps the logits."""

    def __init__(self):
        self.logits = []

    def __call__(self, logits):
        self.logits.append(logits)
        return one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_greedy_drafts_are_what_the_decoder_proposes(tiny_target, tiny_drafter, variant):
    drafter = tiny_drafter(tiny_target("llama", torch.float64), draft_vocab_size=150, **variant)
    rows, K = 8, 4
    batch = batch_of([(1, rows + K)])
    features = noise_features(batch)
    for t in range(rows):
        at_once, in_pieces, warp = (*(drafter.start([[0]], t + 2 * K) for _ in range(2)), Remember())
        drafter.observe(at_once, rows_of(features, 0, t + 1), batch.input_ids[:, 1 : t + 2], torch.tensor([t + 1]))
        tokens = drafter.propose(at_once, chain(K), None, None).tokens
        for start, end in pairwise(sorted({0, t // 2, t, t + 1})):
            drafter.propose(in_pieces, chain(K), None, None) if start else None  # must leave no trace
            # What follows the rows that count is anything.
            rows, ids = rows_of(features, start, end + 1), batch.input_ids[:, start + 1 : end + 2]
            drafter.observe(in_pieces, rows, ids, torch.tensor([end - start]))
        assert torch.equal(drafter.propose(in_pieces, chain(K), warp, None).tokens, tokens)

        ids = batch.input_ids.clone()
        ids[:, t + 2 : t + 2 + K] = tokens  # the text is what was drafted, so that all steps of row t apply
        text = dataclasses.replace(batch, input_ids=ids)
        assert torch.equal(drafter.greedy_drafts(text, features, K)[0, t], tokens[0])
        assert_relative(torch.cat(warp.logits), logits_at(drafter, text, features, K)[:, t], limit=1e-12)
        assert torch.isin(tokens, drafter.draft_to_target_ids).all()


def test_proposing_twice_gives_the_same_logits(tiny_target, tiny_drafter):
    drafter = tiny_drafter(tiny_target("llama", torch.float64))
    batch, warp = batch_of([(1, 5)]), Remember()
    state = drafter.start([[0]], 20)
    drafter.observe(state, rows_of(noise_features(batch), 0, 5), batch.input_ids[:, 1:], torch.tensor([5]))
    for _ in range(2):
        drafter.propose(state, chain(3), warp, None)
    assert_relative(torch.cat(warp.logits[3:]), torch.cat(warp.logits[:3]))


@pytest.mark.parametrize("train_lm_head", [True, False])
def test_only_the_head_is_trained(tiny_target, tiny_drafter, train_lm_head):
    target = tiny_target()
    drafter = tiny_drafter(target, draft_vocab_size=90, fc_norm=True, train_lm_head=train_lm_head)
    batch = batch_of([(2, 6)])
    drafter.loss(batch, target.capture(batch, drafter.wants)).loss.backward()
    parts = ("q_proj", "k_proj", "v_proj", "o_proj")
    expected = {f"midlayer.self_attn.{part}.weight" for part in parts}
    expected |= {f"midlayer.mlp.{part}.weight" for part in ("gate_proj", "up_proj", "down_proj")}
    expected |= {f"midlayer.{part}.weight" for part in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    expected |= {"fc.weight", "norm.weight", "fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight"}
    expected |= {"lm_head.weight"} if train_lm_head else set()
    assert {name for name, p in drafter.named_parameters() if p.grad is not None and p.grad.norm() > 0} == expected
    assert {name for name, p in drafter.named_parameters() if p.requires_grad} == expected
    assert drafter.state_dict().keys() == expected | {"lm_head.weight", "draft_to_target_ids"}
    assert drafter.embed_tokens.data_ptr() == target.embed_tokens.data_ptr()  # shared, not copied
    assert all(p.grad is None and not p.requires_grad for p in target.model.parameters())


def untrained(target, settings, ids=None):
    return settings.build(target.parts, torch.arange(258) if ids is None else ids).to(target.model.dtype)


def test_head_starts_as_the_targets_rows_and_final_norm(tiny_target, tiny_drafter):
    target, ids = tiny_target(), torch.tensor([3, 50, 257])
    with torch.no_grad():
        target.decoder.module.norm.weight.add_(torch.arange(32.0))
    drafter = untrained(target, tiny_drafter(target).settings, ids)
    assert torch.equal(drafter.lm_head.weight, target.lm_head[ids])
    assert torch.equal(drafter.norm.weight, target.parts.final_norm)


@pytest.mark.parametrize(("family", "qk_norm"), [("llama", False), ("llama", True), ("qwen3", True)])
def test_copied_layer_computes_what_the_targets_layer_does(tiny_target, tiny_drafter, family, qk_norm):
    target = tiny_target(family, torch.float64)
    settings = tiny_drafter(target, aux_layers=(2, 4, 5), init_layer=5, qk_norm=qk_norm).settings
    drafter = untrained(target, settings)
    if qk_norm and family == "llama":  # the target has none to copy: they start at 1
        assert all(bool((drafter.midlayer.self_attn[name].weight == 1).all()) for name in ("q_norm", "k_norm"))
        return
    batch = batch_of([(3, 9)])
    with torch.no_grad():
        expected = target.model(input_ids=batch.input_ids, output_hidden_states=True).hidden_states[6]  # leaves layer 5
        (found,) = drafter._unroll(batch, target.capture(batch, drafter.wants), [torch.arange(12)])
    assert_relative(found, expected[0])


def test_layer_without_a_dense_feed_forward_cannot_be_copied(tiny_target, tiny_drafter):
    with pytest.raises(ValueError, match=r"init_layer.*mlp\.gate_proj"):
        tiny_drafter(tiny_target("qwen3_moe"), init_layer=-1)


@pytest.mark.parametrize("layers", [(4, 2), (2, 2, 5), (0, 4), (2, 8), (-3, 5)])
def test_aux_layers_that_engines_cannot_capture_are_refused(tiny_target, tiny_drafter, layers):
    with pytest.raises(ValueError, match=r"aux_layers .*between 1 and 7"):
        tiny_drafter(tiny_target(), aux_layers=layers)


def test_default_aux_layers_by_hand(tiny_target, tiny_drafter):
    assert tiny_drafter(tiny_target()).wants.aux_layers == (2, 4, 5)  # of 8 layers
    assert [default_aux_layers(n) for n in (30, 32, 36)] == [(2, 15, 27), (2, 16, 29), (2, 18, 33)]


def test_state_dict_round_trip_keeps_drafts_and_their_vocabulary(tiny_target, tiny_drafter, tmp_path):
    target = tiny_target()
    trained = tiny_drafter(target, draft_vocab_size=40, seed=3, fc_norm=True)
    torch.save(trained.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    other = untrained(target, tiny_drafter(target, fc_norm=True).settings, state["draft_to_target_ids"])
    batch = batch_of([(2, 8)])
    features = target.capture(batch, trained.wants)
    drafts = trained.greedy_drafts(batch, features, 3)
    assert not torch.equal(other.greedy_drafts(batch, features, 3), drafts)
    other.load_state_dict(state)
    assert torch.equal(other.greedy_drafts(batch, features, 3), drafts)
    best = logits_at(trained, batch, features, 3).argmax(-1).T  # (R, K) in the draft vocabulary
    ids = trained.draft_to_target_ids.tolist()
    assert drafts[0].tolist() == [[ids[index] for index in row] for row in best.tolist()]
    assert ids == sorted(set(ids)) and len(ids) == 40 and max(ids) > 40
