"""MTP layers that targets bring along: read, trained, decoded and named as in the target's folder.

The reference for DeepSeek-V3 and GLM-4-MoE is transformers' own MTP forward; for Qwen3.5, Qwen3-Next and MiMo, which
transformers does not run, the formula of vLLM's module around transformers' decoder layer.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers.modeling_layers import MtpModel

from conf import InputError
from data.encode import Document
from data.packing import collate_alone
from data.target import Target, TargetConfig
from eval.generate import plain_generate, speculative_generate
from tests.delta_rule import use_exact_rule
from tests.eval.decoding import decoding, static_tree
from tests.families import settings_of
from tests.mtp_targets import LAYERS, SHAPES, WIDTH, Mtp, save_mtp_target
from tests.train.drafters.test_eagle3 import assert_relative, batch_of
from train.acceptance import round_walk
from train.drafters.base import chain
from train.drafters.flops import module_flops

OF_TRANSFORMERS = ("glm4_moe", "deepseek_v3")
"""Whose MTP layers it runs itself."""


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    use_exact_rule(monkeypatch)


@pytest.fixture(scope="module")
def with_mtp(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Target, Mtp]]:
    """with_mtp(family, dtype) -> a random target whose folder has an MTP layer, and that layer's tensors there."""

    def make(family: str, dtype: torch.dtype = torch.float32) -> tuple[Target, Mtp]:
        folder = tmp_path_factory.mktemp(family) / "model"
        mtp = save_mtp_target(folder, family)
        settings = TargetConfig(
            name="tiny", path=str(folder), revision=None, dtype="float32", chat_template_kwargs={},
            trust_remote_code=False, compile=False,
        )  # fmt: skip
        target = Target(settings, torch.float32)
        if getattr(target.hf_config, "num_experts_per_tok", None) is not None:
            target.model.set_experts_implementation("eager")  # the grouped kernels know no float64
        if family in OF_TRANSFORMERS:
            # transformers knows the numbers of the published models' MTP layers.
            target.model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{LAYERS}\."]
        target.model.to(dtype)
        return target, mtp

    return make


def drafter_of(target: Target, **changes: Any) -> Any:
    settings = settings_of("mtp", native=True, draft_vocab_size=None, row_keep_ratio=1.0, **changes)
    drafter: Any = settings.build(target.parts, torch.arange(258))
    return drafter.to(target.model.dtype)


def reference(target: Target, drafter: Any, ids: Tensor, states: Tensor) -> Tensor:
    """What the LM head reads after one step, for rows 0..n-2."""
    positions, embeds = torch.arange(ids.shape[1] - 1)[None], target.embed_tokens[ids[:, 1:]].clone()
    if target.hf_config.model_type in OF_TRANSFORMERS:
        native = MtpModel.from_pretrained(target.model).to(states.dtype)
        embeds[:, 0] = 0  # in vLLM
        output: Tensor = native.forward_layer(0, states[:, :-1], positions, None, inputs_embeds=embeds)
        return output
    mtp, eps = drafter.mtp, target.hf_config.rms_norm_eps
    of_mimo = target.hf_config.model_type == "mimo"
    if of_mimo:
        embeds[:, 0] = 0

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (weight + (not of_mimo))  # Qwen's count from 1

    both = [norm(embeds, mtp.enorm.weight), norm(states[:, :-1], mtp.hnorm.weight)]
    joined = torch.cat(both[::-1] if of_mimo else both, dim=-1)
    joined = joined @ mtp.eh_proj.weight.T
    rotary = target.decoder.module.rotary_emb(joined, position_ids=positions)
    found = mtp.mtp_block(joined, position_embeddings=rotary, position_ids=positions, attention_mask=None, cache=None)
    return norm(found[0] if isinstance(found, tuple) else found, mtp.post_norm.weight)


def before_final_norm(target: Target, ids: Tensor) -> Tensor:
    """(1, T, D), by transformers."""
    seen: list[Tensor] = []
    handle = target.model.model.norm.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    target.model(input_ids=ids)
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("family", SHAPES)
def test_first_step_is_the_native_forward(with_mtp: Any, family: str) -> None:
    target, _ = with_mtp(family, torch.float64)
    drafter = drafter_of(target)
    batch = batch_of([(3, 9)])
    features = target.capture(batch, drafter.wants)
    with torch.no_grad():
        read = before_final_norm(target, batch.input_ids) if family == "mimo" else features.last_hidden_state
        expected = reference(target, drafter, batch.input_ids, read)[0]
        (stream,) = drafter._unroll(batch, features, [torch.arange(3, 12)])
    assert_relative(drafter.normed(stream).detach()[:-1], expected[3:])  # transformers' norms compute in float32


@pytest.mark.parametrize("family", SHAPES)
def test_all_of_it_is_trained_and_goes_back_under_its_names(with_mtp: Any, family: str) -> None:
    target, mtp = with_mtp(family)
    drafter = drafter_of(target)
    before = {name: tensor.clone() for name, tensor in drafter.to_serving().target_tensors.items()}
    assert before.keys() == mtp.keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in mtp.items())
    batch = batch_of([(3, 30)])
    drafter.loss(batch, target.capture(batch, drafter.wants)).loss.backward()
    assert all(p.grad is not None and p.grad.norm() > 0 for p in drafter.parameters())
    assert all(p.grad is None for p in target.model.parameters())
    with torch.no_grad():
        drafter.mtp.eh_proj.weight.add_(1)
    after = drafter.to_serving().target_tensors
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert len(changed) == 1 and changed < mtp.keys()


@pytest.mark.parametrize("family", SHAPES)
def test_decoding_is_lossless_and_as_the_walk_says(with_mtp: Any, family: str) -> None:
    target, _ = with_mtp(family, torch.float64)
    drafter = drafter_of(target).requires_grad_(False).eval()
    prompts = [[3, 17], [5, 9, 30, 2, 2, 11, 7]]
    wanted = [run.tokens for run in plain_generate(target, prompts, decoding(chain(1), 24)).answers]
    for plan in (chain(3), static_tree(2, 2)) if target.decoder.can_forget else (chain(3),):
        found = speculative_generate(target, drafter, prompts, decoding(plan, 24)).answers
        assert [run.tokens for run in found] == wanted
    chains = speculative_generate(target, drafter, prompts, decoding(chain(3), 24)).answers
    for prompt, run in zip(prompts, chains, strict=True):
        text = Document(prompt + run.tokens, [False] * len(prompt) + [True] * len(run.tokens), "test")
        batch = collate_alone(text, 40)
        walked = round_walk(drafter, batch, target.capture(batch, drafter.wants), 3)
        assert walked == [[entry.num_accepted for entry in run.rounds]]


def test_targets_without_such_a_layer_are_refused(tiny_target: Any, with_mtp: Any) -> None:
    with pytest.raises(InputError, match="no MTP layer of its own"):
        drafter_of(tiny_target())
    target, _ = with_mtp("qwen3_5_text")
    file = Path(target.folder, "model.safetensors")
    tensors = load_file(file)
    del tensors["mtp.fc.weight"]
    save_file(tensors, str(file), metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"MTP layer of .*eh_proj\.weight"):
        drafter_of(target)
    target, _ = with_mtp("qwen3_next")
    file = Path(target.folder, "model.safetensors")
    tensors = load_file(file)
    del tensors["mtp.layers.0.mlp.experts.2.up_proj.weight"]
    save_file(tensors, str(file), metadata={"format": "pt"})
    with pytest.raises(InputError, match="lacks matrices of some experts"):
        drafter_of(target)


@pytest.mark.parametrize("family", list(SHAPES))
def test_flops_of_the_feed_forward_part_are_what_torch_counts(with_mtp: Any, family: str) -> None:
    """Routed experts, their router and shared experts included."""
    target, _ = with_mtp(family)
    mlp = drafter_of(target).mtp.mtp_block.mlp
    rows = torch.randn(1, 11, WIDTH, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        mlp(rows).sum().backward()
    assert module_flops(mlp, target.hf_config.get_text_config(), 11) == counter.get_total_flops() > 0
