"""llama.cpp itself: its converter makes of our native head what our GGUF file holds, and it accepts what we accept.

Opt-in (`make test-llama-cpp`): it builds llama.cpp from the sources in PyPI's llama-cpp-python.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from serve_export.readers.llama_cpp import parts

pytestmark = pytest.mark.llama_cpp
ROOT = Path(__file__).parents[2]
BUILD = ROOT / ".llama-cpp"
K, TOKENS, PROMPTS = 3, 128, 12


@pytest.fixture(scope="module")
def target_gguf(served: Any, smollm2_folder: str) -> Path:
    """The target by llama.cpp's own converter."""
    program = BUILD / "bin" / "llama-speculative-simple"
    if not program.exists():
        pytest.skip("no llama.cpp: run `make test-llama-cpp`")
    return convert(smollm2_folder, served.output / "target.gguf")


def convert(folder: str, path: Path, *options: str) -> Path:
    script = BUILD / "source" / "convert_hf_to_gguf.py"
    argv = [sys.executable, str(script), folder, "--outtype", "bf16", "--outfile", str(path), *options]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return path


@pytest.fixture(scope="module")
def head(served: Any, checkpoint: str, target_gguf: Path) -> Path:
    folder = served.output / "gguf"
    served.command(
        "serve_export", f"checkpoint={checkpoint}", "stack=gguf", f"target_gguf={target_gguf}", f"output_dir={folder}"
    )
    return folder / "model.gguf"


def test_its_converter_makes_the_same_file(served: Any, checkpoint: str, smollm2_folder: str, head: Path) -> None:
    native = served.output / "native"
    served.command("serve_export", f"checkpoint={checkpoint}", "stack=vllm", f"output_dir={native}")
    converted = convert(str(native), served.output / "converted.gguf", "--target-model-dir", smollm2_folder)
    (our_keys, ours), (their_keys, theirs) = parts(head), parts(converted)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    same = {key for key in our_keys if key.startswith(("eagle3.", "tokenizer.")) and key in their_keys}
    assert {key: our_keys[key] for key in same} == {key: their_keys[key] for key in same}
    assert {key for key in their_keys if key.startswith("eagle3.")} <= our_keys.keys()


def test_it_accepts_what_we_accept(
    served: Any, checkpoint: str, smollm2_folder: str, head: Path, target_gguf: Path
) -> None:
    decoded = served.evaluate(
        "llama-cpp", f"checkpoint={checkpoint}", f"corpus.max_conversations={PROMPTS}", f"max_tokens={TOKENS}",
        f"num_draft_tokens={K}",
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    emitted = accepted = 0
    for prompt in decoded.prompts:
        argv = [
            str(BUILD / "bin" / "llama-speculative-simple"), "-m", str(target_gguf), "-md", str(head), "--spec-type",
            "draft-eagle3", "--spec-draft-n-max", str(K), "--spec-draft-p-min", "0", "--temp", "0", "-n", str(TOKENS),
            "--no-escape", "-p", tokenizer.decode(prompt), "-c", "2048",
        ]  # fmt: skip
        done = subprocess.run(argv, capture_output=True, text=True, check=False, errors="replace")
        assert done.returncode == 0, done.stderr[-3000:]
        counts = dict(re.findall(r"(n_\w+)\s*=\s*(\d+)", done.stdout + done.stderr))
        emitted, accepted = emitted + int(counts["n_predict"]), accepted + int(counts["n_accept"])
    engine = emitted / (emitted - accepted)  # every round emits its accepted drafts and one token of the target
    ours = decoded.summary["acceptance_length_decoded"]
    row = {"ours": ours, "engine": engine, "prompts": len(decoded.prompts), "num_draft_tokens": K}
    (served.output / "llama-cpp.json").write_text(json.dumps(row))
    print(f"\nllama.cpp: {row}")
    assert ours > 1.1
    assert engine == pytest.approx(ours, rel=0.03)
