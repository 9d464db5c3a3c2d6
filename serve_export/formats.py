"""Every format that a drafter can be written in: who writes it, what it must hold, and who reads it independently."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from serve_export import gguf_contract
from serve_export.readers import causal_lm as read_causal_lm
from serve_export.readers import eagle1 as read_eagle1
from serve_export.readers import eagle3 as read_eagle3
from serve_export.readers import llama_cpp as read_llama_cpp
from serve_export.readers import medusa as read_medusa
from serve_export.readers.layer import Probe
from serve_export.source import Known, Source
from serve_export.tables import TABLES
from serve_export.writers import causal_lm, eagle1, eagle3, llama_cpp, medusa, speculators


@dataclass(frozen=True)
class Format:
    """One way to lie on disk."""

    write: Callable[[Source, Path], None]
    """Fill an empty folder."""
    faults: Callable[[Path, Known], list[str]]
    """What in a folder breaks the contract."""
    read: Callable[[Path, Probe], Tensor]
    """(K, Vd) logits of greedy drafts, by the format's formulas."""


FORMATS = {
    "eagle3": Format(eagle3.write, TABLES["eagle3"].faults, read_eagle3.read),
    "eagle3-speculators": Format(speculators.write, TABLES["eagle3-speculators"].faults, read_eagle3.read_speculators),
    "eagle3-gguf": Format(llama_cpp.write, gguf_contract.faults, read_llama_cpp.read),
    "eagle1": Format(eagle1.write, TABLES["eagle1"].faults, read_eagle1.read),
    "eagle1-sglang": Format(eagle1.write_for_sglang, TABLES["eagle1-sglang"].faults, read_eagle1.read),
    "medusa": Format(medusa.write, TABLES["medusa"].faults, read_medusa.read),
    "medusa-tgi": Format(medusa.write_original, TABLES["medusa-tgi"].faults, read_medusa.read_original),
    "medusa-trtllm": Format(medusa.write_for_trtllm, TABLES["medusa-trtllm"].faults, read_medusa.read_original),
    "causal-lm": Format(causal_lm.write, TABLES["causal-lm"].faults, read_causal_lm.read),
}
"""By name; export.json says which one a folder is in."""
