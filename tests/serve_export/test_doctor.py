"""Heads that load and accept nothing, as public issues describe them: each is told by name, and mended if it can be."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from conf import InputError
from serve_export import doctor
from tests.serve_export.exports import LLAMA3_ROPE, drafter_of, export

IDS = "eagle_aux_hidden_state_layer_ids"
Tensors, Config = dict[str, Tensor], dict[str, Any]


def nested_only(tensors: Tensors, config: Config) -> None:
    del config[IDS], config["num_aux_hidden_states"]


def top_only(tensors: Tensors, config: Config) -> None:
    del config["eagle_config"], config["num_aux_hidden_states"]


def no_layer_ids(tensors: Tensors, config: Config) -> None:
    top_only(tensors, config)
    del config[IDS]


def one_list_copied(tensors: Tensors, config: Config) -> None:
    config["eagle_config"][IDS] = config[IDS]


def no_rope_theta(tensors: Tensors, config: Config) -> None:
    del config["rope_theta"], config["rope_scaling"]


def no_rope_at_all(tensors: Tensors, config: Config) -> None:
    no_rope_theta(tensors, config)
    del config["rope_parameters"]


def rope_scaling_lost(tensors: Tensors, config: Config) -> None:
    config["rope_scaling"], config["rope_parameters"] = None, {"rope_type": "default", "rope_theta": 10000.0}


def model_prefix(tensors: Tensors, config: Config) -> None:
    for name in [name for name in tensors if name not in ("d2t", "t2d")]:
        tensors[f"model.{name}"] = tensors.pop(name)


def absolute_d2t(tensors: Tensors, config: Config) -> None:
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def absolute_d2t_alone(tensors: Tensors, config: Config) -> None:
    absolute_d2t(tensors, config)
    del tensors["t2d"]


def zero_d2t(tensors: Tensors, config: Config) -> None:
    tensors["d2t"] = torch.zeros_like(tensors["d2t"])


def no_d2t(tensors: Tensors, config: Config) -> None:
    del tensors["d2t"]


def no_map(tensors: Tensors, config: Config) -> None:
    del tensors["d2t"], tensors["t2d"]


def no_lm_head(tensors: Tensors, config: Config) -> None:
    del tensors["lm_head.weight"]


def no_lm_head_and_absolute_ids(tensors: Tensors, config: Config) -> None:
    absolute_d2t_alone(tensors, config)
    no_lm_head(tensors, config)


def no_fc(tensors: Tensors, config: Config) -> None:
    del tensors["fc.weight"]


def draft_vocab_size_missing(tensors: Tensors, config: Config) -> None:
    del config["draft_vocab_size"]


def vocab_size_of_the_draft(tensors: Tensors, config: Config) -> None:
    config["vocab_size"] = config["draft_vocab_size"]


def verifier_tensors(tensors: Tensors, config: Config) -> None:
    tensors["verifier_norm.weight"] = torch.ones(32)
    tensors["verifier_lm_head.weight"] = torch.ones(50, 32)


def bias_on_fc(tensors: Tensors, config: Config) -> None:
    tensors["fc.bias"] = torch.ones(32)


def zero_bias_on_fc(tensors: Tensors, config: Config) -> None:
    tensors["fc.bias"] = torch.zeros(32)


def layers_0(tensors: Tensors, config: Config) -> None:
    for name in [name for name in tensors if name.startswith("midlayer.")]:
        tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)


def switches_unstated(tensors: Tensors, config: Config) -> None:
    for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "tie_word_embeddings"):
        del config[key]


BROKEN: list[tuple[Callable[[Tensors, Config], None], str, bool]] = [
    (nested_only, "layer ids", True),  # vllm#43671, vllm#50170, SpecForge's and NVIDIA's heads
    (top_only, "layer ids", True),  # sglang#21274
    (no_layer_ids, "layer ids", True),  # vllm#50170
    (one_list_copied, "layer ids contradict each other", False),
    (no_rope_theta, "rotary positions", True),  # Automodel#2920, SpecForge#265
    (no_rope_at_all, "rotary positions", True),
    (rope_scaling_lost, "rotary positions", True),  # speculators#574
    (model_prefix, "model. prefix", True),
    (absolute_d2t, "absolute ids in d2t", True),  # verl-SpeCo#67
    (absolute_d2t_alone, "absolute ids in d2t", True),
    (zero_d2t, "d2t does not fit t2d", True),
    (no_d2t, "no d2t", True),  # Automodel#2447
    (no_map, "no d2t", False),
    (no_lm_head, "no lm_head", True),  # sglang#27908
    (no_lm_head_and_absolute_ids, "no lm_head, absolute ids in d2t", True),
    (no_fc, "no fc.weight", False),
    (draft_vocab_size_missing, "sizes", True),  # TensorRT-LLM#6492, EAGLE#214
    (vocab_size_of_the_draft, "sizes", True),
    (verifier_tensors, "verifier tensors", True),
    (bias_on_fc, "bias on fc", False),
    (zero_bias_on_fc, "bias on fc", True),
    (layers_0, "layer called layers.0", True),
    (switches_unstated, "unstated", True),  # vllm#38111, vllm#46488
]


@pytest.fixture(scope="module")
def target(tiny_target: Callable[..., Any]) -> Any:
    return tiny_target("llama", rope_parameters=LLAMA3_ROPE)


def broken(target: Any, folder: Path, spoil: Callable[[Tensors, Config], None], case: str = "eagle3") -> Path:
    """A good export, and then not; `folder` keeps nothing of how it was made."""
    family, name = {"eagle3": ("eagle3", "eagle3"), "eagle1": ("eagle1", "eagle1"), "medusa": ("medusa", "medusa")}[
        case
    ]
    # Its LM head is the target's rows, as after training with train_lm_head=false.
    settings = {"draft_vocab_size": 50, "noise": 0.0} if case == "eagle3" else {"num_heads": 3}
    export(target, drafter_of(family, target, **settings), name, folder)
    (folder / "export.json").unlink()
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    spoil(tensors, config)
    save_file({k: v.contiguous() for k, v in tensors.items()}, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(config))
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
def test_fault_is_named_and_mended(
    target: Any, tmp_path: Path, spoil: Callable[[Tensors, Config], None], name: str, mendable: bool
) -> None:
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
