"""A head under examination, and what is found: see doctor.py."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig

LAYERS = "eagle_aux_hidden_state_layer_ids"


@dataclass
class Patient:
    """A head as it lies on disk; cures change `tensors` and `config`."""

    folder: Path
    kind: str
    """eagle3, eagle1, medusa or unknown."""
    tensors: dict[str, Tensor]
    config: dict[str, Any]
    target: PretrainedConfig | None
    """The target's text config, if it was named."""
    target_path: str | None
    target_head: Tensor | None = None
    """(V, D), the target's LM head, if its folder is here."""
    target_embedding: Tensor | None = None
    """(V, D), its embedding."""

    def description(self) -> str:
        """What it is."""
        names = {"eagle3": "EAGLE-3", "eagle1": "EAGLE-1", "medusa": "Medusa", "unknown": "unknown"}
        written = self.config.get("architectures") or ["no architecture stated"]
        return f"{names[self.kind]} head ({written[0]}), {len(self.tensors)} tensors, {self.dtype()}"

    def dtype(self) -> str:
        """Of its floats."""
        floats = [tensor.dtype for tensor in self.tensors.values() if tensor.is_floating_point()]
        return str(floats[0]).removeprefix("torch.") if floats else "float32"

    def vocab_size(self) -> int:
        """V: the target's, if it is known; else what `t2d` or config.json say."""
        if self.target is not None:
            return int(self.target.vocab_size)
        marks = self.tensors.get("t2d")
        return len(marks) if marks is not None else int(self.config.get("vocab_size", 0))

    def draft_vocab_size(self) -> int:
        """Rows of its LM head; V where it has none."""
        head = self.tensors.get("lm_head.weight")
        if head is not None and self.kind == "eagle3":
            return len(head)
        return self.vocab_size()

    def nested(self) -> dict[str, Any]:
        """The section `eagle_config`."""
        found: dict[str, Any] = self.config.get("eagle_config") or {}
        return found

    def facts(self) -> dict[str, Any]:
        """What contracts call facts, from its own (mended) config."""
        if self.kind == "eagle1":
            return {}
        if self.kind == "medusa":
            own = not self.config.get("original_lm_head", False)
            return {
                "num_heads": self.config["num_heads"], "num_layers": self.config["num_hidden_layers"],
                "own_lm_heads": own,
            }  # fmt: skip
        return {
            "aux_layers": self.config[LAYERS],
            "fc_norm": self.config["fc_norm"],
            "norm_output": self.config["norm_output"],
            "norm_before_residual": self.config["norm_before_residual"],
            "qk_norm": any(name.endswith("q_norm.weight") for name in self.tensors),
        }

    def rename(self, pattern: str, replacement: str) -> None:
        """Rename the tensors whose whole name matches."""
        self.tensors = {re.sub(f"^(?:{pattern})$", replacement, name): tensor for name, tensor in self.tensors.items()}

    def drop(self, pattern: str) -> None:
        """Leave out the tensors whose whole name matches."""
        self.tensors = {name: part for name, part in self.tensors.items() if not re.fullmatch(pattern, name)}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    name: str
    message: str
    engines: str
    """Who is hit."""
    fatal: bool
    """Whether the head is of no use while it is so."""
    mend: Callable[[Patient], None] | None = None


Rule = Callable[[Patient], Finding | None]
