"""What is wrong with a head that somebody else wrote, for each engine, and a mended copy of it.

For everyone whose head loads and accepts nothing: heads of SpecForge, speculators, EAGLE, ModelOpt and Medusa. What can
be told from the files (and the target's config, if `target_path=` names it) is told; what can be mended without
guessing is mended. The rules are in tensor_rules.py and config_rules.py.
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

from conf import InputError
from conf.records import read_safetensors, write_json
from serve_export import config_rules, tensor_rules
from serve_export.formats import FORMATS
from serve_export.patient import Finding, Patient
from serve_export.source import SHAPE_KEYS, Known
from train.drafters.layers import llama_shape
from train.warm_start import find_pickle, read_files

RULES = {
    "eagle3": (*tensor_rules.EAGLE3, *config_rules.EAGLE3),
    "eagle1": (*tensor_rules.EAGLE1, *config_rules.EAGLE1),
    "medusa": (*tensor_rules.MEDUSA, *config_rules.MEDUSA),
}
WIDE = 2
"""EAGLE-3's attention reads [embedding; feature]."""


def read(folder: Path, target_path: str | None) -> Patient:
    """Read a folder, and tell what kind of head it is.

    Raises:
        InputError: if there is no head in it, or only a pickle.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickle = find_pickle(folder)
        if pickle is not None:
            raise InputError(
                f"{folder}: {pickle} is a pickle, which may run code, and is not read; save it as safetensors"
            )
        raise InputError(f"{folder} holds no *.safetensors: it is no head")
    tensors, config = read_files(folder, files)
    target = None
    if target_path is not None:
        try:
            target = AutoConfig.from_pretrained(target_path).get_text_config()
        except (OSError, ValueError) as error:
            raise InputError(f"target_path={target_path} cannot be read: {str(error).splitlines()[0]}") from error
    head, embedding = (None, None) if target_path is None else _target_matrices(target_path)
    return Patient(folder, kind_of(tensors), tensors, config, target, target_path, head, embedding)


def kind_of(tensors: dict[str, Tensor]) -> str:
    """eagle3, eagle1 or medusa, told by shapes; "unknown" otherwise."""
    if any(".linear.weight" in name or name.startswith("blocks.") for name in tensors):
        return "medusa"
    query = next((tensor for name, tensor in tensors.items() if name.endswith("self_attn.q_proj.weight")), None)
    output = next((tensor for name, tensor in tensors.items() if name.endswith("self_attn.o_proj.weight")), None)
    if query is None or output is None:
        return "unknown"
    return "eagle3" if query.shape[1] == WIDE * output.shape[0] else "eagle1"


def _target_matrices(target_path: str) -> tuple[Tensor | None, Tensor | None]:
    """(V, D) LM head and embedding of the target, if its folder is here."""
    found: dict[str, Tensor] = {}
    for file in sorted(Path(target_path).glob("*.safetensors")):
        found |= read_safetensors(file, _matrices)
    embedding = found.get("model.embed_tokens.weight")
    return found.get("lm_head.weight", embedding), embedding


def _matrices(path: str) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as file:
        names = {"lm_head.weight", "model.embed_tokens.weight"} & set(file.keys())
        return {name: file.get_tensor(name) for name in names}


def examine(patient: Patient) -> tuple[list[Finding], Patient]:
    """Look for everything that is known to go wrong; each rule sees what the cures before it have made of the head.

    Returns:
        What is wrong, and the head with everything mended that can be.
    """
    if patient.kind == "unknown":
        lost = Finding("no known head", "its tensors are those of no head that is known here", "every engine", True)
        return [lost], patient
    mended = replace(patient, tensors=dict(patient.tensors), config=dict(patient.config))
    found = []
    for rule in RULES[patient.kind]:
        finding = rule(mended)
        if finding is not None:
            found.append(finding)
            if finding.mend is not None:
                finding.mend(mended)
    return found, mended


def report(patient: Patient, findings: list[Finding]) -> str:
    """What `doctor=` prints."""
    lines = [f"{patient.folder}: {patient.description()}"]
    for finding in findings:
        cure = "can be mended" if finding.mend is not None else "cannot be mended"
        lines.append(f"- {finding.name} (hits {finding.engines}; {cure}): {finding.message}")
    if not findings:
        lines.append("nothing wrong was found")
    if patient.target is None:
        lines.append("without target_path=TARGET its sizes, rotary positions and vocabulary were not compared")
    return "\n".join(lines)


def write(mended: Patient, folder: Path) -> list[str]:
    """Write the head anew, in its native form; returns what still breaks its contract."""
    tensors = {name: tensor.contiguous().clone() for name, tensor in mended.tensors.items()}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    write_json(folder / "config.json", mended.config)
    return [] if mended.target is None else FORMATS[mended.kind].faults(folder, known(mended))


def record(patient: Patient) -> dict[str, Any]:
    """export.json of a mended head."""
    parts = []
    if patient.target is not None:
        parts.append(
            {"format": patient.kind, "folder": ".", "known": asdict(known(patient)), "changed": [], "sha256": {}}
        )
    return {"mended_from": str(patient.folder), "parts": parts}


def known(patient: Patient) -> Known:
    """What a mended head must agree with."""
    assert patient.target is not None  # callers have asked
    shape = llama_shape(patient.target)
    own = {key: getattr(shape, key) for key in SHAPE_KEYS}
    # A head may be smaller than the layers of its target: its own config says so, and its tensors must agree.
    own |= {key: patient.config[key] for key in ("intermediate_size", "num_attention_heads", "num_key_value_heads",
                                                 "head_dim", "rms_norm_eps", "max_position_embeddings")
            if key in patient.config}  # fmt: skip
    return Known(
        head=patient.kind,
        facts=patient.facts(),
        draft_vocab_size=patient.draft_vocab_size(),
        shape=own,
        target=str(patient.target_path),
        target_architecture=(patient.target.architectures or ["unknown"])[0],
        dtype=patient.dtype(),
        num_draft_tokens=1,
    )
