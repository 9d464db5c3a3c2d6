"""Does an exported folder compute what the trained drafter computes, and does it keep its contract?"""

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf import InputError
from conf.records import read_json
from data.batch import TargetFeatures
from serve_export.formats import FORMATS
from serve_export.readers.layer import KNOWN_ROPES, Probe
from serve_export.source import Known, Source
from serve_export.writers import stitch
from train.checkpoint import LoadedDrafter
from train.drafters.base import Drafter, chain

RECORD = "export.json"
"""Marks a folder as an export of ours, and says what it must agree with."""
STITCHED, OWN = "stitched", "outrider"
"""The two formats that are copies: of the target, and of the checkpoint."""
OWN_FILES = ("model.safetensors", "config.yaml", "manifest.json")
PROBE_TOKENS = 24
TOLERANCE = 1e-4
"""Largest difference of logits relative to their spread: float32 rounding of two different implementations."""


def record(source: Source, format_name: str, folder: Path, place: str = ".") -> dict[str, Any]:
    """What export.json says of one folder of weights.

    Args:
        source: the drafter.
        format_name: one of formats.py, or a copy.
        folder: where the files are now.
        place: where they are below the export.
    """
    return {
        "format": format_name,
        "folder": place,
        "known": asdict(source.known()),
        "changed": sorted(source.servable.target_tensors) if format_name == STITCHED else [],
        "sha256": {name: _sha256(folder / name) for name in OWN_FILES} if format_name == OWN else {},
    }


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "missing"


def faults_of(folder: Path) -> list[str]:
    """What is wrong with an export of ours, one sentence each; [] if it keeps its contract.

    Raises:
        InputError: if it is no export of ours, or a file is missing or damaged.
    """
    if not (folder / RECORD).is_file():
        raise InputError(f"{folder} has no {RECORD}: it is no export of ours; try doctor={folder}")
    parts = read_json(folder / RECORD)["parts"]
    if not parts:
        raise InputError(f"{folder} was mended without its target: doctor={folder} target_path=TARGET knows more")
    found = []
    for part in parts:
        place = folder / part["folder"]
        if part["format"] == STITCHED:
            found += stitch.differences(Path(part["known"]["target"]), place, part["changed"])
        elif part["format"] == OWN:
            changed = [name for name, digest in part["sha256"].items() if _sha256(place / name) != digest]
            found += [f"{name} is not the file that was exported" for name in changed]
        else:
            found += FORMATS[part["format"]].faults(place, Known(**part["known"]))
    return found


@torch.no_grad()
def compare_logits(loaded: LoadedDrafter, source: Source, format_name: str, folder: Path) -> float | None:
    """Draft logits of the exported files against the trained drafter's, on a probe text.

    Drafter and target's matrices are rounded to the exported dtype and run in float32, like the reader.

    Returns:
        The largest relative difference; None if the head uses a rope scaling that the readers do not implement (the
        contract still holds).

    Raises:
        InputError: if they differ.
    """
    drafter, target = loaded.drafter, loaded.target
    rope = source.shape.rope_parameters["rope_type"]
    if rope not in KNOWN_ROPES and format_name != "causal-lm":
        return None
    num_drafts = min(source.num_draft_tokens, drafter.max_draft_tokens or source.num_draft_tokens)
    text = torch.arange(PROBE_TOKENS)[None].to(target.device) * 7 % target.hf_config.vocab_size
    last, features = target.step(text[:, :-1], target.new_cache(1, PROBE_TOKENS), drafter.wants)
    rounded = getattr(torch, source.dtype)
    probe = Probe(
        ids=text[0].cpu(),
        aux_hidden_states=features.aux_hidden_states[0].float().cpu(),
        last_hidden_state=last[0].float().cpu(),
        embed_tokens=target.embed_tokens.to("cpu", rounded).float(),
        lm_head=target.lm_head.to("cpu", rounded).float(),
        num_draft_tokens=num_drafts,
    )
    _round(drafter.to("cpu", torch.float32), rounded)
    ours = draft_logits(drafter, probe)
    theirs = FORMATS[format_name].read(folder, probe)
    difference = float((ours - theirs).abs().max() / theirs.std())
    if not difference <= TOLERANCE:
        raise InputError(
            f"{folder}: exported head and trained drafter differ by {difference:.2e} of the logits' spread"
        )
    return difference


def _round(drafter: Drafter, dtype: torch.dtype) -> None:
    """What was written: weights, and the target's matrices that it holds; no module's tables of frequencies."""
    for parameter in drafter.parameters():
        parameter.data = parameter.to(dtype).to(torch.float32)
    for name, buffer in list(drafter.named_buffers(recurse=False)):
        if buffer.is_floating_point():  # may be the target's own tensor: replaced, not written to
            setattr(drafter, name, buffer.to(dtype).to(torch.float32))


def draft_logits(drafter: Any, probe: Probe) -> Tensor:
    """(K, Vd) logits that the drafter's own greedy `propose` chooses from after the probe."""
    seen: list[Tensor] = []

    def best(logits: Tensor) -> Tensor:
        seen.append(logits[0].float())
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()

    count = len(probe.ids) - 1
    state = drafter.start([probe.ids.tolist()], len(probe.ids) + probe.num_draft_tokens)
    features = TargetFeatures(probe.aux_hidden_states[None], probe.last_hidden_state[None])
    drafter.observe(state, features, probe.ids[None, 1:], torch.tensor([count]))
    drafter.propose(state, chain(probe.num_draft_tokens), best, None)
    return torch.stack(seen)
