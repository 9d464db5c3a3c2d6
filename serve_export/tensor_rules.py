"""Rules of `doctor=` about tensors: names, and the vocabulary's map. Those about config.json are in config_rules.py.

Each comes from public issues of the engines and trainers. A rule looks at a patient and returns a finding, or None; a
finding brings its cure where nothing has to be guessed.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from serve_export.patient import Finding, Patient, Rule

# --- names -----------------------------------------------------------------------------------------------------------


def model_prefix(patient: Patient) -> Finding | None:
    """vLLM puts `model.` before every name itself."""
    if not any(name.startswith("model.") for name in patient.tensors):
        return None
    return Finding(
        "model. prefix", "vLLM adds the prefix itself and stops at names that have it", "vLLM", True,
        lambda p: p.rename(r"model\.(.*)", r"\1"),
    )  # fmt: skip


def layer_name(patient: Patient) -> Finding | None:
    """`layers.0` (speculators) and `midlayer` (native) are the same."""
    if not any(name.startswith("layers.0.") for name in patient.tensors):
        return None
    return Finding(
        "layer called layers.0", "the native name is midlayer; TensorRT-LLM and our contract ask for it", "few", False,
        lambda p: p.rename(r"layers\.0\.(.*)", r"midlayer.\1"),
    )  # fmt: skip


def verifier_tensors(patient: Patient) -> Finding | None:
    """speculators' training checkpoints carry parts of the target."""
    if not any(name.startswith("verifier_") for name in patient.tensors):
        return None
    return Finding(
        "verifier tensors", "copies of the target's parts, at which vLLM stops", "vLLM", True,
        lambda p: p.drop(r"verifier_.*"),
    )  # fmt: skip


def embedding_copy(patient: Patient) -> Finding | None:
    """Engines share the target's."""
    own = patient.tensors.get("embed_tokens.weight")
    if own is None:
        return None
    who = "SGLang, TensorRT-LLM"
    if patient.target_embedding is None:
        return Finding("own embedding", "they take the target's instead; is it the same? (target_path=)", who, False)
    if _same(own, patient.target_embedding):
        return Finding(
            "copy of the embedding", "it is the target's, which engines share: left out", "none", False,
            lambda p: p.drop(r"embed_tokens\.weight"),
        )  # fmt: skip
    return Finding("own embedding", "they take the target's instead, and this one differs", who, False)


def missing_fc(patient: Patient) -> Finding | None:
    """vLLM runs with whatever was in memory."""
    if "fc.weight" in patient.tensors:
        return None
    return Finding("no fc.weight", "vLLM and SGLang load the head and accept nothing", "vLLM, SGLang", True)


def fc_bias(patient: Patient) -> Finding | None:
    """Dropped by vLLM."""
    bias = patient.tensors.get("fc.bias")
    if bias is None:
        return None
    if bool(bias.any()):
        return Finding("bias on fc", "vLLM leaves it out without a word, and drafts are others", "vLLM", True)
    return Finding("bias on fc", "it is zero, and vLLM has no place for it", "vLLM", False, lambda p: p.drop("fc.bias"))


# --- vocabulary ------------------------------------------------------------------------------------------------------


def missing_head(patient: Patient) -> Finding | None:
    """Without lm_head and with a reduced vocabulary, engines draft through memory as it was."""
    if "lm_head.weight" in patient.tensors:
        return None
    ids = _mapped_ids(patient)
    if patient.target_head is None or (ids is None and not {"d2t", "t2d"}.isdisjoint(patient.tensors)):
        message = "engines draft through uninitialised memory (target_path= may mend it)"
        return Finding("no lm_head", message, "vLLM, SGLang", True)
    rows = patient.target_head if ids is None else patient.target_head[ids]
    return Finding(
        "no lm_head", "engines draft through uninitialised memory; put in are the target's rows, which is right if the "
        "head was trained with them frozen", "vLLM, SGLang", True,
        lambda p: p.tensors.update({"lm_head.weight": rows.to(getattr(torch, p.dtype()))}),
    )  # fmt: skip


def _mapped_ids(patient: Patient) -> Tensor | None:
    """Absolute ids of the draft vocabulary, by t2d or the only plausible reading of d2t; None where nothing says."""
    if "t2d" in patient.tensors:
        return torch.nonzero(patient.tensors["t2d"]).flatten()
    if "d2t" not in patient.tensors:
        return None
    stored = patient.tensors["d2t"].long()
    readings = [stored + torch.arange(len(stored)), stored]
    plausible = [ids for ids in readings if _plausible(ids, None, patient.vocab_size())]
    return plausible[0] if len(plausible) == 1 else None


def vocabulary_map(patient: Patient) -> Finding | None:
    """`d2t` must hold offsets, and only where the draft vocabulary is a part."""
    size = patient.draft_vocab_size()
    stored, marks = patient.tensors.get("d2t"), patient.tensors.get("t2d")
    if size == patient.vocab_size():
        superfluous = Finding(
            "d2t beside a whole vocabulary", "vLLM has no place for it and stops", "vLLM", True,
            lambda p: p.drop("d2t|t2d"),
        )  # fmt: skip
        return None if stored is None and marks is None else superfluous
    known = None if marks is None else torch.nonzero(marks).flatten()
    if known is not None and len(known) != size:
        return Finding("t2d of another size", f"it marks {len(known)} tokens, the head has {size} rows", "all", True)
    if stored is None:
        cure = None if known is None else _set_map(known)
        return Finding("no d2t", "draft ids are taken for target ids: almost nothing is accepted", "all", True, cure)
    return _misread(stored, known, patient.vocab_size())


def _misread(stored: Tensor, known: Tensor | None, vocab_size: int) -> Finding | None:
    """What is wrong with a `d2t` that is there; `known`: the ids that t2d marks."""
    offsets, absolute = stored.long() + torch.arange(len(stored)), stored.long()
    readings = [_plausible(ids, known, vocab_size) for ids in (offsets, absolute)]
    if readings == [True, True]:
        return Finding("d2t can be read in two ways", "as offsets and as ids, and there is no t2d", "all", True)
    if readings == [True, False]:
        complete = known is not None and stored.dtype == torch.int64
        partial = Finding(
            "half a vocabulary map", "t2d is missing, or d2t is no int64", "few", False, _set_map(offsets)
        )
        return None if complete else partial
    if readings == [False, True]:
        message = "engines add the position to each: drafts are other tokens"
        return Finding("absolute ids in d2t", message, "all", True, _set_map(absolute))
    if known is not None:
        return Finding("d2t does not fit t2d", "drafts are other tokens than meant", "all", True, _set_map(known))
    return Finding("d2t cannot be read", "neither as offsets nor as ids, and there is no t2d", "all", True)


def _plausible(ids: Tensor, known: Tensor | None, vocab_size: int) -> bool:
    ascending = bool((ids.diff() > 0).all()) and int(ids.min()) >= 0 and int(ids.max()) < vocab_size
    return ascending and (known is None or torch.equal(ids, known))


def _set_map(ids: Tensor) -> Callable[[Patient], None]:
    def mend(patient: Patient) -> None:
        marks = torch.isin(torch.arange(patient.vocab_size()), ids)
        patient.tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": marks}

    return mend


EAGLE3: tuple[Rule, ...] = (
    model_prefix, verifier_tensors, layer_name, embedding_copy, missing_fc, fc_bias, missing_head, vocabulary_map
)  # fmt: skip
"""In this order: each sees what the cures before it have made of the head."""


# --- EAGLE-1 ---------------------------------------------------------------------------------------------------------


def unknown_to_eagle1(patient: Patient) -> Finding | None:
    """Names for which vLLM has no place."""
    found = [name for name in patient.tensors if name in ("lm_head.weight", "layers.0.input_layernorm.weight")]
    if not found:
        return None
    target = patient.target_head
    head = patient.tensors.get("lm_head.weight")
    if head is not None and target is not None and not _same(head, target):
        return Finding("own lm_head", "EAGLE-1 heads draft through the target's, this one has another", "all", True)
    return Finding(
        f"{found[0]} in the file", "vLLM has no place for it in an EAGLE-1 head and stops", "vLLM", True,
        lambda p: p.drop(r"lm_head\.weight|layers\.0\.input_layernorm\.weight"),
    )  # fmt: skip


def _same(ours: Tensor, theirs: Tensor) -> bool:
    return ours.shape == theirs.shape and torch.equal(ours.to(torch.bfloat16), theirs.to(torch.bfloat16))


EAGLE1: tuple[Rule, ...] = (model_prefix, embedding_copy, missing_fc, fc_bias, unknown_to_eagle1)

# --- Medusa ----------------------------------------------------------------------------------------------------------


def medusa_names(patient: Patient) -> Finding | None:
    """The authors' names; vLLM knows them too, our contract wants its own."""
    depth = max((int(name.split(".")[-3]) for name in patient.tensors if ".linear." in name), default=None)
    if depth is None:
        return None

    def mend(p: Patient) -> None:
        p.rename(r"(?:medusa_heads\.)?(\d+)\.(\d+)\.linear\.(weight|bias)", r"blocks.\1.layers.\2.\3")
        p.rename(r"(?:medusa_heads\.)?(\d+)\.\d+\.weight", r"lm_heads.\1.weight")

    return Finding("names of Medusa's authors", "vLLM reads them with the method named only", "few", False, mend)


def medusa_heads(patient: Patient) -> Finding | None:
    """vLLM does not notice that they are missing."""
    if any(name.startswith("lm_heads.") for name in patient.tensors):
        return None
    head = patient.target_head
    if head is None:
        return Finding(
            "no lm_heads", "vLLM drafts through uninitialised memory (target_path= can mend it)", "vLLM", True
        )

    def mend(p: Patient) -> None:
        p.tensors["lm_heads.0.weight"] = head.to(getattr(torch, p.dtype()))
        p.config = {**p.config, "original_lm_head": True}

    return Finding(
        "no lm_heads", "vLLM drafts through uninitialised memory; put in is the target's", "vLLM", True, mend
    )


def medusa_vocabulary(patient: Patient) -> Finding | None:
    """A part of the vocabulary cannot be served."""
    rows = next((len(part) for name, part in patient.tensors.items() if name.startswith("lm_heads.")), None)
    if rows is None or not patient.vocab_size() or rows == patient.vocab_size():
        return None
    return Finding(
        "reduced vocabulary", f"{rows} rows of {patient.vocab_size()}: vLLM 0.32 cannot load it", "vLLM", True
    )


MEDUSA: tuple[Rule, ...] = (medusa_names, medusa_heads, medusa_vocabulary)
