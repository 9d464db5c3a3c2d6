"""Targets that training has changed, through the real commands: nothing else of their folder changes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from conf import InputError
from serve_export.check import faults_of
from serve_export.writers.stitch import differences, stitch
from tests.mtp_targets import save_mtp_target
from tests.train.conftest import TINY, Launcher, write_corpus
from train.checkpoint import load_drafter

OF_EAGLE3 = ("drafter=", "drafter.train_lm_head", "drafter.draft_vocab_size")


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next"])
def test_trained_layer_goes_back_into_its_target(launcher: Launcher, tmp_path: Path, family: str) -> None:
    folder = tmp_path / "target"
    mtp = save_mtp_target(folder, family)
    write_corpus(tmp_path / "talk.jsonl", 12)
    argv = [argument for argument in TINY if not argument.startswith(OF_EAGLE3)]
    argv += [f"target.path={folder}", "corpus.path=talk.jsonl", "drafter=mtp", "drafter.native=true", "output_dir=run"]
    launcher("train", [*argv, "drafter.draft_vocab_size=null"], tmp_path).succeeded()
    options = ["corpus=jsonl", "corpus.path=talk.jsonl", "max_tokens=12", "plain_prompts=2"]
    done = launcher("eval", ["checkpoint=run", "output_dir=eval", *options], tmp_path).succeeded()
    assert "stack=target" in done.out  # the command that comes next
    summary = json.loads((tmp_path / "eval" / "summary.json").read_text())
    assert summary["outputs_equal_to_plain"] == 2 and summary["rounds_differing_from_walk"] == []
    launcher("serve_export", ["checkpoint=run", "stack=target", "output_dir=new"], tmp_path).succeeded()
    old, new = (load_file(tmp_path / name / "model.safetensors") for name in ("target", "new"))
    assert old.keys() == new.keys()
    assert {name for name in old if not torch.equal(old[name], new[name])} == mtp.keys()
    assert (tmp_path / "new" / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    # What was trained is what the new folder's own layer drafts like.
    argv = ["+target=qwen3", "+drafter=mtp", "drafter.native=true", "drafter.draft_vocab_size=null",
            "target.path=new", "target.dtype=float32", "target.chat_template_kwargs={}"]  # fmt: skip
    launcher("eval", [*argv, "output_dir=again", *options], tmp_path).succeeded()
    again = json.loads((tmp_path / "again" / "summary.json").read_text())
    assert again["joint_rates"] == summary["joint_rates"] and again["num_rounds"] == summary["num_rounds"]
    assert faults_of(tmp_path / "new") == []
    refused = launcher("serve_export", ["checkpoint=run", "stack=vllm", "output_dir=head"], tmp_path)
    assert refused.code == 2 and "stack=target" in refused.err and not (tmp_path / "head").exists()
    name = sorted(mtp)[0]
    spoilt = {**new, "model.norm.weight": new["model.norm.weight"] + 1}
    del spoilt[name]
    save_file(spoilt, str(tmp_path / "new" / "model.safetensors"), metadata={"format": "pt"})
    assert faults_of(tmp_path / "new") == [f"missing tensor {name}", "model.norm.weight differs from the target's"]
    checked = launcher("serve_export", ["check=new"], tmp_path)
    assert checked.code == 2 and f"missing tensor {name}" in checked.err


def test_medusa2_exports_its_target_and_the_heads_beside_it(
    launcher: Launcher, tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    write_corpus(tmp_path / "talk.jsonl", 12)
    argv = [argument for argument in TINY if not argument.startswith(OF_EAGLE3)]
    argv += [f"target.path={tiny_folder('qwen3')}", "corpus.path=talk.jsonl", "drafter=medusa2", "output_dir=run"]
    launcher("train", [*argv, "drafter.draft_vocab_size=null", "drafter.num_heads=3"], tmp_path).succeeded()
    options = ["checkpoint=run", "dtype=float32", "output_dir=new"]
    refused = launcher("serve_export", [*options, "stack=vllm"], tmp_path)
    assert refused.code == 2 and "stack=target" in refused.err
    done = launcher("serve_export", [*options, "stack=target"], tmp_path).succeeded()
    assert '"model": "new/heads"' in done.out and faults_of(tmp_path / "new") == []
    old, new = load_file(tiny_folder("qwen3") / "model.safetensors"), load_file(tmp_path / "new" / "model.safetensors")
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert old.keys() == new.keys() and changed and all("proj" in name for name in changed)
    # What the new folder says is what the run's own target says.
    loaded = load_drafter(str(tmp_path / "run"), None, torch.float32, trust_remote_code=False)
    ids = torch.tensor([[3, 5, 8, 13]])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "new", dtype=torch.float32)(input_ids=ids).logits
    ours = loaded.target.logits(loaded.target.decoder.module(input_ids=ids).last_hidden_state)
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)


def test_other_targets_are_refused(tmp_path: Path) -> None:
    target, new = tmp_path / "target", tmp_path / "new"
    save_mtp_target(target, "qwen3_5_text")
    new.mkdir()
    with pytest.raises(InputError, match=r"has no model\.layers\.9\.enorm\.weight"):
        stitch(target, {"model.layers.9.enorm.weight": torch.ones(32)}, new)
    with pytest.raises(InputError, match="shape"):
        stitch(target, {"mtp.norm.weight": torch.ones(31)}, new)
    assert list(new.glob("*.safetensors")) == []


def test_untrained_layer_goes_back_bit_for_bit(tmp_path: Path) -> None:
    target, new = tmp_path / "target", tmp_path / "new"
    mtp = save_mtp_target(target, "qwen3_5_text")
    new.mkdir()
    stitch(target, mtp, new)
    assert differences(target, new, []) == []
