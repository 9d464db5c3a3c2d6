"""Tiny exports in every format, for tests that know none of them by name."""

import json
from pathlib import Path
from typing import Any

import gguf

from serve_export.check import RECORD, record
from serve_export.formats import FORMATS
from serve_export.source import Source
from tests.families import tiny_family
from train.checkpoint import LoadedDrafter

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
VOCAB = 258
PORTABLE = {"init_layer": None, "train_lm_head": True}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "eagle3": ("eagle3", "eagle3", {"draft_vocab_size": 50}),
    "eagle3, whole vocabulary": ("eagle3", "eagle3", {}),
    "eagle3, everything of 3.1": (
        "eagle3", "eagle3",
        {"draft_vocab_size": 50, "fc_norm": True, "norm_output": True, "norm_before_residual": True},
    ),
    "eagle3, two states": ("eagle3", "eagle3", {"draft_vocab_size": 50, "aux_layers": (1, 7)}),
    "eagle3, qwen3 layer": ("eagle3", "eagle3", {"draft_vocab_size": 50, "qk_norm": True}),
    "speculators": ("eagle3", "eagle3-speculators", {"draft_vocab_size": 50}),
    "speculators, whole vocabulary": ("eagle3", "eagle3-speculators", {"norm_before_residual": True}),
    "speculators, qwen3 layer": ("eagle3", "eagle3-speculators", {"draft_vocab_size": 50, "qk_norm": True}),
    "gguf": ("eagle3", "eagle3-gguf", {"draft_vocab_size": 50}),
    "gguf, whole vocabulary": ("eagle3", "eagle3-gguf", {"norm_before_residual": True}),
    "eagle1": ("eagle1", "eagle1", {}),
    "hass": ("hass", "eagle1", {}),
    "eagle1, sglang": ("eagle1", "eagle1-sglang", {}),
    "medusa": ("medusa", "medusa", {"num_heads": 3, "num_layers": 2}),
    "medusa, own heads": ("medusa", "medusa", {"num_heads": 3, "own_lm_heads": True}),
    "medusa, tgi": ("medusa", "medusa-tgi", {"num_heads": 3}),
    "medusa, tgi, own heads": ("medusa", "medusa-tgi", {"num_heads": 2, "num_layers": 2, "own_lm_heads": True}),
    "medusa, trtllm": ("medusa", "medusa-trtllm", {"num_heads": 3}),
    "draft model": ("draft_model", "causal-lm", {"num_layers": 2}),
}  # fmt: skip
"""Name -> (family, format, settings)."""


def tiny_gguf(path: Path, vocab_size: int = VOCAB) -> str:
    """A GGUF file with nothing but a tokenizer."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"t{i}" for i in range(vocab_size)])
    writer.add_token_types([1] * vocab_size)
    writer.add_token_merges(["a b", "c d"])
    writer.add_eos_token_id(257)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def drafter_of(family: str, target: Any, seed: int = 0, **settings: Any) -> Any:
    """A noisy drafter that is not trained any more."""
    chosen = {**PORTABLE, **settings}
    return tiny_family(family, target, chosen.pop("draft_vocab_size", None), seed=seed, **chosen).requires_grad_(False)


def export(
    target: Any, drafter: Any, name: str, folder: Path, dtype: Any = "float32", drafts: int = 3
) -> tuple[LoadedDrafter, Source]:
    """Write one format and its record."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = tiny_gguf(folder.parent / f"{folder.name}.target.gguf") if name.endswith("gguf") else None
    source = Source(drafter.to_serving(), target, dtype, drafts, tokens)
    FORMATS[name].write(source, folder)
    (folder / RECORD).write_text(json.dumps({"parts": [record(source, name, folder)]}))
    unused: Any = None
    return LoadedDrafter(folder, drafter, unused, target, unused, {}), source
