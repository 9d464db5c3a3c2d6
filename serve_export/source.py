"""What is exported, and what the finished folder must agree with."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import LlamaConfig

from data.target import Target
from train.drafters.base import Servable
from train.drafters.layers import llama_shape

Dtype = Literal["float32", "bfloat16"]
SHAPE_KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings", "rope_parameters",
)  # fmt: skip


@dataclass(frozen=True)
class Known:
    """What is known of a head without looking into its folder: export.json keeps it, `serve_export check=` reads it."""

    head: str
    """Servable.architecture."""
    facts: dict[str, Any]
    """Servable.config."""
    draft_vocab_size: int
    shape: dict[str, Any]
    """Of the target, as one dense Llama layer beside it has it (`llama_shape`)."""
    target: str
    """Path or hub id."""
    target_architecture: str
    dtype: str
    num_draft_tokens: int

    @property
    def has_map(self) -> bool:
        """Whether draft ids differ from target ids."""
        return self.draft_vocab_size < int(self.shape["vocab_size"])


@dataclass(frozen=True)
class Source:
    """A drafter on its way into a folder."""

    servable: Servable
    target: Target
    dtype: Dtype
    """Of the floats that are written."""
    num_draft_tokens: int
    """K, for formats that state it."""
    target_gguf: str | None = None
    """The target's own GGUF file, for the format that needs one."""

    @property
    def shape(self) -> LlamaConfig:
        """The target's shape, as one dense Llama layer beside it has it."""
        return llama_shape(self.target.hf_config)

    @property
    def draft_ids(self) -> Tensor:
        """(Vd,) int64, absolute."""
        return self.servable.tensors["draft_to_target_ids"].cpu()

    def cast(self, tensor: Tensor) -> Tensor:
        """A copy in the dtype of the export."""
        return tensor.detach().to("cpu", getattr(torch, self.dtype)).contiguous().clone()

    def floats(self) -> dict[str, Tensor]:
        """All tensors but the vocabulary's, in the dtype of the export."""
        named = self.servable.tensors.items()
        return {name: self.cast(tensor) for name, tensor in named if name != "draft_to_target_ids"}

    def vocabulary_map(self) -> dict[str, Tensor]:
        """`d2t` (Vd,) int64 offsets and `t2d` (V,) bool; nothing where the draft vocabulary is the whole one, because
        vLLM then has no place for them."""
        ids, vocab_size = self.draft_ids, self.shape.vocab_size
        if len(ids) == vocab_size:
            return {}
        return {"d2t": ids - torch.arange(len(ids)), "t2d": torch.isin(torch.arange(vocab_size), ids)}

    def known(self) -> Known:
        """What export.json keeps."""
        shape = self.shape
        return Known(
            head=self.servable.architecture,
            facts=self.servable.config,
            draft_vocab_size=len(self.draft_ids),
            shape={key: getattr(shape, key) for key in SHAPE_KEYS},
            target=self.target.folder,
            target_architecture=self.target.model.config.architectures[0],
            dtype=self.dtype,
            num_draft_tokens=self.num_draft_tokens,
        )
