"""The export job: write under a temporary name, hold against the contract, compare logits, then rename."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from omegaconf import DictConfig
from pydantic import Field

from conf import InputError, config
from conf.cli import build
from conf.records import provenance, write_json, write_text
from serve_export import card, check, doctor, hub
from serve_export.check import OWN, OWN_FILES, RECORD, STITCHED
from serve_export.config_rules import TRAPS
from serve_export.contract import require
from serve_export.engines import Offer, Place, offer_for
from serve_export.formats import FORMATS
from serve_export.source import Dtype, Source
from serve_export.writers import stitch
from train.checkpoint import LoadedDrafter, load_drafter


@config
class StackConfig:
    """Values: conf/stack/*.yaml."""

    name: Literal["vllm", "speculators", "sglang", "trtllm", "tgi", "hf", "gguf", "target"]
    """The engine, as in serve_export/engines.py."""


@config
class ExportJob:
    """Values: conf/serve_export.yaml."""

    checkpoint: str | None
    """Export this: run folder (its best checkpoint) or checkpoint folder."""
    check: str | None
    """Hold this export of ours against its contract."""
    doctor: str | None
    """Examine this folder, whoever wrote it, and write a mended copy if there is something to mend."""
    target_path: str | None
    """Where the target is now, if not where training found it; doctor: which target the head is for."""
    trust_remote_code: bool
    """Whether a target that brings its own code may run it."""
    target_gguf: str | None
    """stack=gguf: the target's own GGUF file."""
    stack: StackConfig
    run_name: str
    output_dir: str
    """The folder that engines load. It appears only when it is complete and verified."""
    num_draft_tokens: int = Field(ge=1)
    """K in the serve command."""
    dtype: Dtype
    """Of the exported tensors."""
    push: str | None
    """Hub repository that the finished folder goes to."""


def run(composed: DictConfig) -> None:
    """`python -m serve_export`: export, check or examine.

    Raises:
        InputError: for anything that the user can mend, or if the result breaks its contract.
    """
    job: ExportJob = build(composed)
    asked = [key for key in ("checkpoint", "check", "doctor") if getattr(job, key) is not None]
    if len(asked) != 1:
        came = " and ".join(asked) or "none"
        raise InputError(f"give one of checkpoint=RUN, check=FOLDER or doctor=FOLDER; got {came}")
    if job.check is not None:
        _check(Path(job.check))
    elif job.doctor is not None:
        _examine(job, job.doctor)
    else:
        assert job.checkpoint is not None  # it was asked for
        _export(job, load_drafter(job.checkpoint, job.target_path, torch.float32, job.trust_remote_code))


def _check(folder: Path) -> None:
    faults = check.faults_of(folder)
    require(faults, folder)
    _print({"folder": str(folder), "contract": "holds"})


def _examine(job: ExportJob, path: str) -> None:
    patient = doctor.read(Path(path), job.target_path)
    findings, mended = doctor.examine(patient)
    print(doctor.report(patient, findings))  # noqa: T201
    if not findings or any(finding.fatal and finding.mend is None for finding in findings):
        return
    final = Path(job.output_dir)
    with _writing(final) as folder:
        require(doctor.write(mended, folder), folder)
        write_json(folder / RECORD, {**doctor.record(mended), "provenance": provenance()})
        _put_in_place(folder, final)
    _print({"mended": str(final), "contract": "holds" if mended.target is not None else "unknown without target_path="})


def _export(job: ExportJob, loaded: LoadedDrafter) -> None:
    target, final = loaded.target, Path(job.output_dir)
    servable = loaded.drafter.to_serving()
    source = Source(servable, target, job.dtype, job.num_draft_tokens, job.target_gguf)
    offer = offer_for(job.stack.name, source)
    place = Place(target.folder, job.output_dir, job.num_draft_tokens)
    _require_plain_name(job, servable.architecture)
    with _writing(final) as folder:
        summary = _write_parts(loaded, source, offer, folder)
        if offer.options is not None:
            write_text(folder / "trtllm.yaml", offer.options(source, place))
        command = offer.command(place)
        evaluation = card.find_evaluation(loaded, job.run_name)
        write_text(folder / "README.md", card.card(loaded, source, place, evaluation, job.stack.name))
        facts = {"checkpoint": str(loaded.folder), "export_dir": str(final), "num_draft_tokens": job.num_draft_tokens}
        record = {**facts, **summary, "serve_command": command, "provenance": provenance()}
        write_json(folder / RECORD, record)
        require(check.faults_of(folder), folder)
        _put_in_place(folder, final)
    shown = {key: value for key, value in summary.items() if key != "parts"}
    where = {"pushed": hub.push(final, job.push)} if job.push is not None else {}
    _print({"export": str(final), **shown, "contract": "holds", **where, "serve_command": command})


def _write_parts(loaded: LoadedDrafter, source: Source, offer: Offer, folder: Path) -> dict[str, Any]:
    """Fill `folder`, and compare logits; returns what is worth knowing of it."""
    difference, beside = None, []
    if offer.format == OWN:
        for name in OWN_FILES:
            shutil.copy2(loaded.folder / name, folder / name)
    elif offer.format == STITCHED:
        stitch.stitch(Path(source.target.folder), source.servable.target_tensors, folder)
        if len(source.servable.tensors) > 1:  # heads beside the changed target
            head = source.servable.architecture
            difference = _write_head(loaded, source, head, folder / "heads")
            beside = [check.record(source, head, folder / "heads", "heads")]
    else:
        difference = _write_head(loaded, source, offer.format, folder)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.suffix in (".safetensors", ".gguf"))
    parts = [check.record(source, offer.format, folder), *beside]
    return {"megabytes": round(size / 1e6, 1), "logits_difference": difference, "parts": parts}


def _write_head(loaded: LoadedDrafter, source: Source, name: str, folder: Path) -> float | None:
    folder.mkdir(exist_ok=True)
    FORMATS[name].write(source, folder)
    return check.compare_logits(loaded, source, name, folder)


def _require_plain_name(job: ExportJob, head: str) -> None:
    trap = next((part for part in TRAPS if part in job.output_dir.lower()), None)
    if job.stack.name in ("vllm", "target") and not head.startswith("eagle") and trap is not None:
        raise InputError(
            f"output_dir={job.output_dir}: vLLM would take a {head} folder for another method because of the "
            f"{trap!r} in its path: choose another name"
        )


@contextmanager
def _writing(final: Path) -> Iterator[Path]:
    """An empty folder beside `final`, gone again unless it was renamed."""
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=final.parent, prefix=f".writing-{final.name}-") as scratch:
        folder = Path(scratch) / final.name
        folder.mkdir()
        yield folder


def _put_in_place(folder: Path, final: Path) -> None:
    """Rename; an earlier export of the same name is replaced, anything else there is left alone."""
    if final.exists():
        if not (final / RECORD).is_file():
            raise InputError(f"{final} exists and is no export of ours: choose another output_dir=")
        old = final.with_name(f".old-{final.name}")
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        folder.rename(final)
        shutil.rmtree(old)
    else:
        folder.rename(final)


def _print(summary: dict[str, Any]) -> None:
    print("\n".join(f"{key:>18}  {value}" for key, value in summary.items()))  # noqa: T201
