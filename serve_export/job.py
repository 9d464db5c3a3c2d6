"""The export job: write under a temporary name, verify, compare, then rename."""

import json
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
from omegaconf import DictConfig
from pydantic import Field
from safetensors.torch import save_file

from conf import InputError, config
from conf.cli import build
from conf.records import provenance, write_json, write_text
from serve_export import card, check, contract, to_vllm
from serve_export.stitch import stitch
from train.checkpoint import LoadedDrafter, load_drafter

RECORD = "export.json"
"""Marks a folder as an export of ours."""


@config
class StackConfig:
    """Values: conf/stack/*.yaml."""

    name: Literal["vllm", "target"]
    """vllm: a head in vLLM's native format. target: the target's folder with its own MTP layer replaced."""


@config
class ExportJob:
    """Values: conf/serve_export.yaml."""

    checkpoint: str
    """Run folder (its best checkpoint) or checkpoint folder."""
    target_path: str | None
    """Where the target is now, if not where training found it."""
    trust_remote_code: bool
    """Whether a target that brings its own code may run it."""
    stack: StackConfig
    run_name: str
    output_dir: str
    """The folder that engines load. It appears only when it is complete and verified."""
    num_draft_tokens: int = Field(ge=1)
    """K in the serve command."""
    dtype: Literal["float32", "bfloat16"]
    """Of the exported tensors."""


def run(composed: DictConfig) -> None:
    """`python -m serve_export`: write a verified folder and print its serve command.

    Raises:
        InputError: for anything that the user can mend, or if the result breaks its contract.
    """
    job: ExportJob = build(composed)
    final = Path(job.output_dir)
    loaded = load_drafter(job.checkpoint, job.target_path, torch.float32, job.trust_remote_code)
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=final.parent, prefix=f".writing-{final.name}-") as scratch:
        folder = Path(scratch) / final.name
        folder.mkdir()
        write = _write_target if job.stack.name == "target" else _write_head
        summary = write(job, loaded, folder)
        record = {"checkpoint": str(loaded.folder), "export_dir": str(final), "num_draft_tokens": job.num_draft_tokens}
        write_json(folder / RECORD, {**record, **summary, "provenance": provenance()})
        _put_in_place(folder, final)
    _print({"export": str(final), **summary})


def _write_head(job: ExportJob, loaded: LoadedDrafter, folder: Path) -> dict[str, Any]:
    """A folder that holds the head; returns what is worth knowing of it."""
    servable = loaded.drafter.to_serving()
    tensors = to_vllm.tensors(servable, loaded.target.hf_config.vocab_size, getattr(torch, job.dtype))
    command = to_vllm.serve_command(loaded.target.folder, job.output_dir, job.num_draft_tokens)
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    write_json(folder / "config.json", to_vllm.config(servable, loaded.target, job.dtype))
    write_text(folder / "README.md", card.card(loaded, card.find_evaluation(loaded, job.run_name), command))
    contract.verify_folder(folder, loaded.target.hf_config)
    difference = check.compare_logits(loaded, folder, job.num_draft_tokens)
    return {
        "tensors": len(tensors),
        "megabytes": round(sum(tensor.nbytes for tensor in tensors.values()) / 1e6, 1),
        "contract": "holds",
        "logits_difference": difference,
        "serve_command": command,
    }


def _write_target(job: ExportJob, loaded: LoadedDrafter, folder: Path) -> dict[str, Any]:
    """The target's own folder, its MTP layer replaced."""
    replaced = stitch(Path(loaded.target.folder), loaded.drafter.to_serving(), folder)
    speculative = json.dumps({"method": "mtp", "num_speculative_tokens": job.num_draft_tokens})
    command = shlex.join(["vllm", "serve", job.output_dir, "--speculative-config", speculative])
    return {"tensors": len(replaced), "serve_command": command}


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
