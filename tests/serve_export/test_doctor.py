"""Heads that load and accept nothing, as public issues describe them: each is told by name, and mended if it can be."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from conf import InputError
from serve_export import doctor
from tests.serve_export.broken_heads import BROKEN, Config, Fault, Tensors, no_rope_theta, rewrite
from tests.serve_export.exports import LLAMA3_ROPE, drafter_of, export


@pytest.fixture(scope="module")
def target(tiny_target: Callable[..., Any]) -> Any:
    return tiny_target("llama", rope_parameters=LLAMA3_ROPE)


def broken(target: Any, folder: Path, spoil: Fault, case: str = "eagle3") -> Path:
    """A good export, and then not; `folder` keeps nothing of how it was made."""
    family, name = {"eagle3": ("eagle3", "eagle3"), "eagle1": ("eagle1", "eagle1"), "medusa": ("medusa", "medusa")}[
        case
    ]
    # Its LM head is the target's rows, as after training with train_lm_head=false.
    settings = {"draft_vocab_size": 50, "noise": 0.0} if case == "eagle3" else {"num_heads": 3}
    export(target, drafter_of(family, target, **settings), name, folder)
    (folder / "export.json").unlink()
    rewrite(folder, spoil)
    return folder


def diagnose(folder: Path, target: Any, mended: Path) -> tuple[list[str], list[str] | None]:
    """Names of what was found, and what still breaks the contract of the mended copy (None: it was not mended)."""
    findings, patient = doctor.examine(doctor.read(folder, target.folder))
    names = [finding.name for finding in findings]
    if any(finding.fatal and finding.mend is None for finding in findings):
        return names, None
    mended.mkdir()
    return names, doctor.write(patient, mended)


@pytest.mark.parametrize(("spoil", "name", "mendable"), BROKEN, ids=[spoil.__name__ for spoil, _, _ in BROKEN])
def test_fault_is_named_and_mended(target: Any, tmp_path: Path, spoil: Fault, name: str, mendable: bool) -> None:
    good = broken(target, tmp_path / "good", lambda *_: None)
    names, faults = diagnose(broken(target, tmp_path / "head", spoil), target, tmp_path / "mended")
    assert names == name.split(", ")
    assert (faults is not None) == mendable
    if not mendable:
        return
    assert faults == []
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "mended", good))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)
    config, wanted = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "mended", good))
    assert {key: config[key] for key in wanted} == wanted


def test_healthy_heads_are_left_alone(target: Any, tmp_path: Path) -> None:
    for case in ("eagle3", "eagle1", "medusa"):
        folder = broken(target, tmp_path / f"a {case.replace('eagle', 'e')}", lambda *_: None, case)
        findings, patient = doctor.examine(doctor.read(folder, target.folder))
        assert findings == []
        assert "nothing wrong was found" in doctor.report(patient, findings)


def test_head_of_speculators_becomes_a_native_one(target: Any, tmp_path: Path) -> None:
    drafter = drafter_of("eagle3", target, draft_vocab_size=50, norm_before_residual=True)
    export(target, drafter, "eagle3-speculators", tmp_path / "head")
    export(target, drafter, "eagle3", tmp_path / "good")
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    del config["norm_before_residual"]  # true where nothing is said
    (tmp_path / "head" / "config.json").write_text(json.dumps(config))
    names, faults = diagnose(tmp_path / "head", target, tmp_path / "mended")
    assert {"format of speculators", "layer called layers.0", "copy of the embedding"} <= set(names)
    assert faults == []
    assert json.loads((tmp_path / "mended" / "config.json").read_text())["norm_before_residual"] is True
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("mended", "good"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)


def own_lm_head(tensors: Tensors, config: Config) -> None:
    tensors["lm_head.weight"] = torch.ones(258, 32)


def test_eagle1_with_another_lm_head_or_architecture(target: Any, tmp_path: Path) -> None:
    names, faults = diagnose(broken(target, tmp_path / "own", own_lm_head, "eagle1"), target, tmp_path / "no")
    assert (names, faults) == (["own lm_head"], None)

    def of_sglang(tensors: Tensors, config: Config) -> None:
        config["architectures"] = ["LlamaForCausalLMEagle"]
        tensors |= {"fc.bias": torch.zeros(32), "lm_head.weight": target.lm_head.clone()}

    names, faults = diagnose(broken(target, tmp_path / "head", of_sglang, "eagle1"), target, tmp_path / "mended")
    assert (names, faults) == (["bias on fc", "lm_head.weight in the file", "architecture"], [])


def test_medusa_of_its_authors_becomes_vllms(target: Any, tmp_path: Path) -> None:
    drafter = drafter_of("medusa", target, num_heads=3)
    export(target, drafter, "medusa-tgi", tmp_path / "head")
    export(target, drafter, "medusa", tmp_path / "good")
    names, faults = diagnose(tmp_path / "head", target, tmp_path / "mended")
    assert names == ["names of Medusa's authors", "no lm_heads", "architecture", "Medusa's settings"]
    assert faults == []
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("mended", "good"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_medusa_whose_biases_vllm_would_drop(target: Any, tmp_path: Path) -> None:
    def spoil(tensors: Tensors, config: Config) -> None:
        config |= {"num_attention_heads": 4}
        del config["medusa_fc_bias"]

    folder = broken(target, tmp_path / "a-head", spoil, "medusa")
    (finding,), _ = doctor.examine(doctor.read(folder, target.folder))
    assert "medusa_fc_bias is missing, not True" in finding.message
    assert "num_attention_heads is taken for something else" in finding.message
    assert diagnose(folder, target, tmp_path / "mended")[1] == []
    trap = broken(target, tmp_path / "my-eagle3-med", lambda *_: None, "medusa")
    assert [finding.name for finding in doctor.examine(doctor.read(trap, target.folder))[0]] == ["path"]


def test_without_the_target_less_is_compared(target: Any, tmp_path: Path) -> None:
    folder = broken(target, tmp_path / "head", no_rope_theta)
    findings, patient = doctor.examine(doctor.read(folder, None))
    assert [finding.name for finding in findings] == ["rotary positions"]  # from rope_parameters
    assert "without target_path=TARGET" in doctor.report(patient, findings)
    (tmp_path / "mended").mkdir()
    assert doctor.write(patient, tmp_path / "mended") == []
    assert json.loads((tmp_path / "mended" / "config.json").read_text())["rope_theta"] == 10000.0


def test_what_is_no_head_is_refused(target: Any, tmp_path: Path) -> None:
    (tmp_path / "pickle").mkdir()
    (tmp_path / "pickle" / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(InputError, match="pickle"):
        doctor.read(tmp_path / "pickle", None)
    with pytest.raises(InputError, match="no head"):
        doctor.read(tmp_path, None)
    with pytest.raises(InputError, match="target_path=nowhere"):
        doctor.read(broken(target, tmp_path / "head", lambda *_: None), "nowhere")
    save_file({"a.weight": torch.ones(2)}, str(tmp_path / "pickle" / "model.safetensors"))
    (finding,), _ = doctor.examine(doctor.read(tmp_path / "pickle", None))
    assert finding.name == "no known head" and finding.mend is None


def test_two_readings_of_d2t_are_left_to_the_user(target: Any, tmp_path: Path) -> None:
    def spoil(tensors: Tensors, config: Config) -> None:
        del tensors["t2d"]
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:4]
        tensors["d2t"] = torch.tensor([0, 2, 4, 6])
        config["draft_vocab_size"] = 4

    names, faults = diagnose(broken(target, tmp_path / "head", spoil), target, tmp_path / "mended")
    assert (names, faults) == (["d2t can be read in two ways"], None)
