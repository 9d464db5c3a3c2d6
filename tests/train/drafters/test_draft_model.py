"""Draft models: adapters, models of other sizes, and pairs that cannot be; early exit's layers and cache."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eval.generate import plain_generate, speculative_generate
from tests.eval.decoding import decoding
from tests.families import settings_of, tiny_family
from tests.train.conftest import Launcher, launcher, write_corpus
from tests.train.drafters.test_eagle3 import assert_relative, batch_of
from train.drafters.base import chain

__all__ = ["launcher"]


def test_adapters_start_as_the_model_and_are_all_that_is_trained(tiny_target: Any) -> None:
    target = tiny_target("llama", torch.float64)
    plain, adapted = (
        settings_of("draft_model", lora_rank=rank).build(target.parts, torch.arange(258)).double() for rank in (None, 4)
    )
    batch = batch_of([(3, 9)])
    features = target.capture(batch, plain.wants)
    assert torch.equal(plain.greedy_drafts(batch, features, 3), adapted.greedy_drafts(batch, features, 3))
    adapted.loss(batch, features).loss.backward()
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    moved = {name for name, p in adapted.named_parameters() if p.grad is not None and p.grad.norm() > 0}
    assert moved == {name for name in trained if "lora_B" in name}  # B starts at zero, so A waits for it


def test_adapters_are_merged_for_serving(tiny_target: Any) -> None:
    target = tiny_target("llama", torch.float64)
    adapted = tiny_family("draft_model", target, lora_rank=4, noise=0.1)
    names = settings_of("draft_model").build(target.parts, torch.arange(258)).to_serving().tensors
    served = adapted.to_serving().tensors
    assert served.keys() == names.keys()
    merged = settings_of("draft_model").build(target.parts, torch.arange(258)).double()
    merged.model.load_state_dict({name: tensor for name, tensor in served.items() if name != "draft_to_target_ids"})
    batch = batch_of([(3, 9)])
    rows = torch.arange(12)
    features = target.capture(batch, merged.wants)
    with torch.no_grad():
        assert_relative(merged.states(batch, features, rows), adapted.states(batch, features, rows))


def test_model_of_another_size_and_kind_drafts(tiny_target: Any, tiny_folder: Callable[..., Path]) -> None:
    target = tiny_target("llama", torch.float64)
    small = tiny_folder("qwen3", hidden_size=16, num_hidden_layers=2, seed=5)
    drafter = (
        settings_of("draft_model", path=str(small), num_layers=None).build(target.parts, torch.arange(258)).double()
    )
    drafter.requires_grad_(False)
    prompts = [[3, 17], [5, 9, 30, 2, 2]]
    wanted = [run.tokens for run in plain_generate(target, prompts, decoding(chain(1), 20)).answers]
    found = speculative_generate(target, drafter, prompts, decoding(chain(3), 20)).answers
    assert [run.tokens for run in found] == wanted


def test_the_target_as_its_own_draft_model_is_always_right(tiny_target: Any) -> None:
    target = tiny_target("llama", torch.float64)
    drafter = settings_of("draft_model", num_layers=None).build(target.parts, torch.arange(258)).double()
    (run,) = speculative_generate(target, drafter.requires_grad_(False), [[3, 17]], decoding(chain(4), 20)).answers
    assert [entry.num_accepted for entry in run.rounds[:-1]] == [4] * (len(run.rounds) - 1)


def test_other_tokenizers_and_impossible_sizes_are_refused(tiny_target: Any, tiny_folder: Any, tmp_path: Path) -> None:
    target = tiny_target()
    other = tmp_path / "other"
    other.mkdir()
    for file in tiny_folder("qwen3").iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    for changes, problem in (
        ({"path": str(other)}, "tokenizer"), ({"path": "nowhere"}, "cannot be loaded"), ({"num_layers": 9}, "8 layers")
    ):  # fmt: skip
        with pytest.raises(ValueError, match=problem):
            settings_of("draft_model", **changes).build(target.parts, torch.arange(258))
    with pytest.raises(ValueError, match="only 8 layers"):
        settings_of("early_exit", exit_layer=8).build(target.parts, torch.arange(258))


def test_early_exit_reads_the_targets_own_layers_and_cache(tiny_target: Any) -> None:
    target = tiny_target("llama", torch.float64)
    drafter = settings_of("early_exit", draft_vocab_size=None, exit_layer=3).build(target.parts, torch.arange(258))
    target_tensors = {p.data_ptr() for p in target.model.parameters()}
    assert not {p.data_ptr() for p in drafter.parameters()} & target_tensors
    assert {name for name, _ in drafter.named_parameters()} == {
        "input_norm.weight", "down.weight", "up.weight", "norm.weight"
    }  # fmt: skip
    caches = []
    step = target.decoder.step

    def record(*arguments: Any, **options: Any) -> Any:
        caches.append(arguments[1])
        return step(*arguments, **options)

    target.decoder.step = record
    try:
        speculative_generate(target, drafter.double().requires_grad_(False), [[3, 17]], decoding(chain(2), 12))
    finally:
        target.decoder.step = step
    assert len({id(cache._buffers) for cache in caches}) == 1  # one store of keys and values, the target's


def test_pair_off_the_shelf_is_evaluated_without_training(launcher: Launcher, tiny_folder: Any, tmp_path: Path) -> None:
    write_corpus(tmp_path / "talk.jsonl", 3)
    argv = [
        "+target=qwen3", f"target.path={tiny_folder('qwen3')}", "target.dtype=float32", "corpus=jsonl",
        "target.chat_template_kwargs={}", "corpus.path=talk.jsonl", "max_tokens=12", "plain_prompts=2",
    ]  # fmt: skip
    launcher("eval", [*argv, "+drafter=draft_model", "output_dir=pair"], tmp_path).succeeded()
    summary = json.loads((tmp_path / "pair" / "summary.json").read_text())
    assert summary["outputs_equal_to_plain"] == 2 and summary["rounds_differing_from_walk"] == []
    refused = launcher("eval", [*argv, "+drafter=eagle3", "output_dir=untrained"], tmp_path)
    assert refused.code == 2 and "must be trained first" in refused.err
    refused = launcher("eval", [*argv, "+drafter=draft_model", "drafter.path=nowhere", "output_dir=x"], tmp_path)
    assert refused.code == 2 and "nowhere" in refused.err
