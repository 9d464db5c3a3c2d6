"""A target's own MTP layer, trained through the real commands and put back: nothing else of the folder changes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conf import InputError
from serve_export.stitch import stitch
from tests.mtp_targets import save_mtp_target
from tests.train.conftest import TINY, Launcher, launcher, write_corpus
from train.drafters.base import Servable

__all__ = ["launcher"]
OF_EAGLE3 = ("drafter=", "drafter.train_lm_head", "drafter.draft_vocab_size")


def test_trained_layer_goes_back_into_its_target(launcher: Launcher, tmp_path: Path) -> None:
    folder = tmp_path / "target"
    mtp = save_mtp_target(folder, "qwen3_5_text")
    write_corpus(tmp_path / "talk.jsonl", 12)
    argv = [argument for argument in TINY if not argument.startswith(OF_EAGLE3)]
    argv += [f"target.path={folder}", "corpus.path=talk.jsonl", "drafter=mtp", "drafter.native=true", "output_dir=run"]
    launcher("train", [*argv, "drafter.draft_vocab_size=null"], tmp_path).succeeded()
    options = ["corpus=jsonl", "corpus.path=talk.jsonl", "max_tokens=12", "plain_prompts=2"]
    launcher("eval", ["checkpoint=run", "output_dir=eval", *options], tmp_path).succeeded()
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
    refused = launcher("serve_export", ["checkpoint=run", "stack=vllm", "output_dir=head"], tmp_path)
    assert refused.code == 2 and "native_mtp" in refused.err and not (tmp_path / "head").exists()


def test_other_drafters_and_other_targets_are_refused(tmp_path: Path) -> None:
    save_mtp_target(tmp_path / "target", "qwen3_5_text")
    (tmp_path / "new").mkdir()
    with pytest.raises(InputError, match="native=true"):
        stitch(tmp_path / "target", Servable("eagle3", {}, {}), tmp_path / "new")
    foreign = Servable("native_mtp", {"model.layers.9.enorm.weight": torch.ones(32)}, {})
    with pytest.raises(InputError, match=r"has no model\.layers\.9\.enorm\.weight"):
        stitch(tmp_path / "target", foreign, tmp_path / "new")
    short = Servable("native_mtp", {"mtp.norm.weight": torch.ones(31)}, {})
    with pytest.raises(InputError, match="shape"):
        stitch(tmp_path / "target", short, tmp_path / "new")
    assert list((tmp_path / "new").glob("*.safetensors")) == []
