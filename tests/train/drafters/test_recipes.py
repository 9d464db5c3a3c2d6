"""MTP, EAGLE-1/HASS and Medusa against their recipes (recipes.md 2.3, 2.5, 2.6) written as loops in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu, smooth_l1_loss

from data.batch import Batch, TargetFeatures
from tests.families import tiny_family
from tests.train.drafters.test_eagle3 import assert_relative, attend, batch_of, rms, turn

EVERY_ROW = {"row_keep_ratio": 1.0, "init_layer": None, "step_loss_decay": 0.7}
DECAY = torch.tensor([1, 0.7, 0.49, 0.343], dtype=torch.float64)


def llama_layer(
    shape: Any, w: dict[str, Tensor], z: Tensor, step: int, keys: list[Tensor], values: list[Tensor]
) -> Any:
    """A Llama layer of z; `w` lacks input_layernorm where there is none."""
    eps, positions = shape.rms_norm_eps, torch.arange(len(z)) + step
    theta = shape.rope_parameters["rope_theta"]
    read = rms(z, w["input_layernorm"], eps) if "input_layernorm" in w else z
    split = {"q": shape.num_attention_heads, "k": shape.num_key_value_heads, "v": shape.num_key_value_heads}
    q, k, v = ((read @ w[f"{name}_proj"].T).unflatten(-1, (heads, -1)) for name, heads in split.items())
    keys.append(turn(k, positions, theta))
    values.append(v)
    y = z + attend(turn(q, positions, theta), keys, values) @ w["o_proj"].T
    m = rms(y, w["post_attention_layernorm"], eps)
    return y + (silu(m @ w["gate_proj"].T) * (m @ w["up_proj"].T)) @ w["down_proj"].T


def mtp_outputs(drafter: Any, w: dict[str, Tensor], ids: Tensor, last: Tensor, steps: int) -> list[Tensor]:
    """What the LM head reads, step by step."""
    keys: list[Tensor] = []
    values: list[Tensor] = []
    g, outputs, eps = last, [], drafter.shape.rms_norm_eps
    for step in range(steps):
        g = g[: len(ids) - 1 - step]
        e = rms(drafter.embed_tokens.double()[ids[1 + step :]], w["token_layernorm"], eps)
        z = torch.cat([e, rms(g, w["hidden_layernorm"], eps)], -1) @ w["input_proj"].T
        g = rms(llama_layer(drafter.shape, w, z, step, keys, values), w["final_layernorm"], eps)
        outputs.append(g)
    return outputs


def eagle1_outputs(drafter: Any, w: dict[str, Tensor], ids: Tensor, last: Tensor, steps: int) -> list[Tensor]:
    keys: list[Tensor] = []
    values: list[Tensor] = []
    g, outputs = last, []
    for step in range(steps):
        g = g[: len(ids) - 1 - step].detach()
        z = torch.cat([drafter.embed_tokens.double()[ids[1 + step :]], g], -1) @ w["fc"].T
        g = llama_layer(drafter.shape, w, z, step, keys, values)
        outputs.append(g)
    return outputs


def medusa_outputs(drafter: Any, w: dict[str, Tensor], ids: Tensor, last: Tensor, steps: int) -> list[Tensor]:
    outputs = []
    for head in range(steps):
        h = last
        for layer in range(drafter.settings.num_layers):
            h = h + silu(h @ w[f"blocks.{head}.{layer}.linear.weight"].T + w[f"blocks.{head}.{layer}.linear.bias"])
        outputs.append(h)
    return outputs


OUTPUTS = {"mtp": mtp_outputs, "eagle1": eagle1_outputs, "hass": eagle1_outputs, "medusa": medusa_outputs}


def step_loss(kind: str, log_p: Tensor, log_q: Tensor, token: int) -> Tensor:
    p = log_p.exp()
    if kind == "ce":
        return -log_q[token]
    if kind == "kl":
        return (p * (log_p - log_q)).sum()
    best = p.topk(10).indices
    extra = 10.0 * (p * log_q)[best].sum() if kind == "top_k_ce" else 0.0
    return -(p * log_q).sum() - extra


def recipe_loss(drafter: Any, w: dict[str, Tensor], batch: Batch, features: TargetFeatures, steps: int) -> Tensor:
    """Row t, step k: taught by p_{t+1+k} where x_{t+1}..x_{t+2+k} are one answer."""
    settings = drafter.settings
    regression, distillation = getattr(settings, "feature_weight", 0.0), getattr(settings, "distillation_weight", 1.0)
    total = torch.zeros((), dtype=torch.float64)
    heads = [w.get(f"lm_heads.{k}.weight", drafter.teacher_rows.double()) for k in range(steps)]
    known = drafter.draft_to_target_ids
    for start, end in batch.document_spans():
        ids, mask, weights, last = (
            tensor.flatten(0, 1)[start:end]
            for tensor in (batch.input_ids, batch.loss_mask, batch.token_weights, features.last_hidden_state)
        )
        teacher = (last.double() @ drafter.target_head.double().T)[:, known].log_softmax(-1)
        for step, output in enumerate(OUTPUTS[settings.name](drafter, w, ids, last.double(), steps)):
            student = (output @ heads[step].T).log_softmax(-1)
            for t in range(len(ids) - 2 - step):
                label = t + 2 + step
                if mask[t + 1 : label + 1].all():
                    token = int(drafter.target_to_draft_ids[ids[label]])
                    found = step_loss(settings.loss, teacher[label - 1], student[t], token)
                    of_state = smooth_l1_loss(output[t], last[label - 1].double())
                    part = distillation * found * (token >= 0 or settings.loss != "ce")
                    total = total + weights[label].double() * DECAY[step] * (part + regression * of_state)
    return total


CASES = [
    ("mtp", {}), ("mtp", {"loss": "ce"}), ("eagle1", {"loss": "soft_ce", "ttt_steps": 1}), ("hass", {"ttt_steps": 3}),
    ("medusa", {"num_heads": 3}), ("medusa", {"num_heads": 4, "num_layers": 2, "own_lm_heads": True, "loss": "ce"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes"), CASES, ids=str)
def test_loss_and_gradients_are_those_of_the_recipe(tiny_target: Any, name: str, changes: dict[str, Any]) -> None:
    target = tiny_target("llama", torch.float64)
    drafter = tiny_family(name, target, 90, **{**EVERY_ROW, **changes})
    batch = batch_of([(3, 7), (1, 3, 1, 5)], [(2, 8, 2)], width=22)
    features = target.capture(batch, drafter.wants)
    result = drafter.loss(batch, features)
    result.loss.backward()
    weights = {key: p.detach().clone().requires_grad_() for key, p in drafter.named_parameters()}
    short = {
        key if name == "medusa" else key.removesuffix(".weight").rpartition(".")[2]: p for key, p in weights.items()
    }
    assert len(short) == len(weights)
    expected = recipe_loss(drafter, short, batch, features, len(result.step_losses))
    expected.backward()
    assert_relative(result.loss.detach(), expected.detach())
    for key, parameter in drafter.named_parameters():
        assert_relative(parameter.grad, weights[key].grad)


def test_blocks_of_a_medusa_head_have_weights_of_their_own(tiny_target: Any) -> None:
    drafter = tiny_family("medusa", tiny_target(), 90, num_heads=2, num_layers=3)
    assert len({p.data_ptr() for p in drafter.blocks.parameters()}) == 2 * 3 * 2


def assert_says_what_the_target_says(drafter: Any, target: Any, num_drafts: int) -> None:
    """Every draft is the target's own guess of the next token."""
    batch = batch_of([(3, 9)])
    features = target.capture(batch, drafter.wants)
    best = target.logits(features.last_hidden_state).argmax(-1)
    assert torch.equal(drafter.greedy_drafts(batch, features, num_drafts), best[..., None].expand(-1, -1, num_drafts))


def test_untrained_medusa_says_what_the_target_says_of_the_next_token(tiny_target: Any) -> None:
    target = tiny_target("llama", torch.float64)
    for own in (False, True):
        drafter = tiny_family("medusa", target, noise=0.0, num_heads=3, own_lm_heads=own)
        assert_says_what_the_target_says(drafter, target, 3)


def test_untrained_mtp_says_what_the_target_says_of_the_next_token(tiny_target: Any) -> None:
    target = tiny_target("llama", torch.float64)
    with torch.no_grad():
        target.decoder.module.norm.weight.add_(torch.rand(32))
    drafter = tiny_family("mtp", target, noise=0.0, init_layer=-1)
    assert_says_what_the_target_says(drafter, target, 2)


def test_untrained_eagle1_gives_the_state_back_and_compares_states_as_the_targets_layer_does(tiny_target: Any) -> None:
    """x / rms(x) * f goes in, and its queries are those of the target's layer on x."""
    target = tiny_target("llama", torch.float64)
    with torch.no_grad():
        target.decoder.module.norm.weight.add_(torch.rand(32))
        target.decoder.layers[5].input_layernorm.weight.add_(torch.rand(32))
    drafter = tiny_family("eagle1", target, noise=0.0, init_layer=5)
    assert_says_what_the_target_says(drafter, target, 2)
    x, attention = torch.randn(7, 32, dtype=torch.float64), target.decoder.layers[5].self_attn
    found = drafter.decoder_layer.self_attn["q_proj"](target.decoder.module.norm(x))
    assert_relative(found, attention.q_proj(target.decoder.layers[5].input_layernorm(x)))
