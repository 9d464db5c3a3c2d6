"""The layers of a causal language model, over packed documents and over caches: `Decoder`, and what drafters share of a
target: `TargetParts`.

The target runs through this, and so does a draft model; gradients flow where the caller lets them. Shape letters: B =
batch, T = tokens, M = rows of one step, D = hidden size, A = auxiliary layers, L = slots of a cache.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from conf import InputError
from data.batch import Batch, TargetFeatures, Wants
from data.cache import TargetCache, step_mask, tree_mask
from data.layer_inputs import LayerInputs
from data.recurrent import mixers

PADDED_TO = 128
"""Documents that have to run alone are padded to a multiple of so many rows: few shapes, few kernels."""


class Decoder:
    """Embedding, layers and final norm of one model, whose attention implementation is `data.attention`."""

    def __init__(self, model: Any) -> None:
        """Take a model of transformers as it is.

        Args:
            model: a causal LM; referenced, not copied.

        Raises:
            InputError: if its layers or final norm cannot be found.
        """
        self.model = model
        self.module: Any = model.get_decoder()
        settings = model.config.get_text_config()
        self.layers = _find_layers(self.module, settings.num_hidden_layers)
        self._inputs = LayerInputs([*self.layers, self._norm()])
        self._mixers = mixers(self.layers, getattr(settings, "layer_types", None) or [])
        self._has_windows = getattr(settings, "sliding_window", None) is not None

    @property
    def can_forget(self) -> bool:
        """Whether rows can be taken back, or run in trees, one by one: where all memory is a list of keys."""
        return not self._mixers

    @property
    def final_norm(self) -> Tensor:
        """(D,), what the norm before the LM head multiplies with."""
        return norm_scale(self._norm())

    def _norm(self) -> Any:
        for name in ("norm", "ln_f", "final_layernorm"):
            if hasattr(self.module, name):
                return getattr(self.module, name)
        raise InputError(f"no final norm found in {type(self.module).__name__}; this model is not supported yet")

    def packed(self, batch: Batch, wants: Wants) -> TargetFeatures:
        """Run over packed documents: no logits, no layer after the last wanted one.

        Returns:
            Features of (B, T) rows in the model's dtype; those of padding are arbitrary.
        """
        shape, ids = batch.input_ids.shape, batch.input_ids.view(-1)
        # All packs end to end: document borders are all that separates them, padding included.
        borders = _borders(batch)
        # A running state knows no borders.
        read = self._together if self.can_forget else self._one_by_one
        features = read(ids, borders, wants)
        last = features.last_hidden_state
        return TargetFeatures(
            aux_hidden_states=features.aux_hidden_states.view(*shape, -1),
            last_hidden_state=None if last is None else last.view(*shape, -1),
        )

    def _one_by_one(self, ids: Tensor, borders: list[int], wants: Wants) -> TargetFeatures:
        """As `_together`, a pass for each document. What pads it comes after it, where it does not look."""
        aux, last = [], []
        for start, end in pairwise(borders):
            rows = end - start
            padded = nn.functional.pad(ids[start:end], (0, -rows % PADDED_TO))
            found = self._together(padded, None, wants)
            aux.append(found.aux_hidden_states[:, :rows])
            if found.last_hidden_state is not None:
                last.append(found.last_hidden_state[:, :rows])
        return TargetFeatures(torch.cat(aux, dim=1), torch.cat(last, dim=1) if last else None)

    def _together(self, ids: Tensor, borders: list[int] | None, wants: Wants) -> TargetFeatures:
        """Features (1, rows, ...) of (rows,) ids; `borders` separate documents, None: there is one."""
        each = pairwise(borders or [0, len(ids)])
        positions = torch.cat([torch.arange(end - start) for start, end in each]).to(ids.device)
        separated = {} if borders is None else {"cu_seq_lens_q": torch.tensor(borders)}
        last_hidden_state = None
        with self._inputs.recording(wants, stop_early=True):
            output = self.module(input_ids=ids[None], position_ids=positions[None], use_cache=False, **separated)
            last_hidden_state = output.last_hidden_state
        return self._inputs.features(last_hidden_state, wants)

    def step(
        self,
        input_ids: Tensor,
        cache: TargetCache,
        wants: Wants,
        visible: Tensor | None = None,
        written: int = 0,
        stop_early: bool = False,
    ) -> tuple[Tensor | None, TargetFeatures]:
        """Read `input_ids` after what `cache` has committed; they count once `cache.commit` is told so.

        Args:
            input_ids: (B, M) int64; sequences with fewer rows are padded on the right with anything.
            cache: of this model.
            wants: the hidden states to keep.
            visible: (B, M, written + M) bool, for trees: which of the slots after the committed ones each row sees,
                itself included; None: all earlier ones.
            written: rows of earlier steps after the committed ones that shall stay.
            stop_early: run no layer after the last wanted one.

        Returns:
            last_hidden_state (B, M, D) after the final norm (None if stopped before), and the features.

        Raises:
            InputError: for trees, in a model with a running state.
        """
        if not self.can_forget:
            if visible is not None:
                raise InputError(f"{type(self.model).__name__} has linear attention, which reads no trees: draft=chain")
            assert not written  # drafters of layers that cannot forget are refused
        batch, num_rows = input_ids.shape
        if visible is None:
            depth = written + torch.arange(num_rows, device=input_ids.device).expand(batch, -1)
        else:
            depth = visible.sum(-1) - 1
        positions = cache.lengths[:, None] + depth
        slots = cache.begin(num_rows, written)
        if visible is None:
            mask = step_mask(cache.lengths + written, num_rows, slots.end)
        else:
            mask = tree_mask(cache.lengths, visible, slots.end)
        windowed = {"distance": cache.distances(positions, slots)} if self._has_windows else {}
        last_hidden_state = None
        with self._inputs.recording(wants, stop_early), self._running(cache):
            output = self.module(
                input_ids=input_ids,
                position_ids=positions,
                attention_mask=mask,
                cache=cache,
                use_cache=True,
                **windowed,
            )
            last_hidden_state = output.last_hidden_state
        features = self._inputs.features(last_hidden_state, wants)
        return last_hidden_state, replace(features, cache=cache)

    @contextmanager
    def _running(self, cache: TargetCache) -> Iterator[None]:
        """Give layers with a running state their part of the cache while the context is open."""

        def enter(number: int, mixer: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
            return {**kwargs, "cache": cache.enter(number, mixer, kwargs["hidden_states"])}

        handles = [
            mixer.register_forward_pre_hook(
                lambda module, args, kwargs, number=number: (args, enter(number, module, kwargs)), with_kwargs=True
            )
            for number, mixer in self._mixers.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@dataclass(frozen=True)
class TargetParts:
    """The frozen pieces of a target that drafters share or start from. Referenced, never copied."""

    config: PretrainedConfig
    """The target's (text) configuration."""
    path: str
    """Folder or hub id that it was loaded from."""
    vocabulary: Mapping[str, int]
    """Its tokens."""
    embed_tokens: Tensor
    """(V, D)."""
    lm_head: Tensor
    """(V, D); the same tensor as embed_tokens where the target ties them."""
    final_norm: Tensor
    """(D,), what the norm before the LM head multiplies with."""
    decoder: Decoder
    """Its layers."""


@torch.no_grad()
def norm_scale(norm: Any) -> Tensor:
    """(D,) what a norm multiplies with: Gemma and Qwen3.5 store 1 less, other models the weight itself."""
    weight: Tensor = norm.weight.detach()
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    if isinstance(norm, torch.nn.LayerNorm):
        return weight
    found: Tensor = weight + (norm(torch.ones_like(norm.weight)) - weight).round()
    return found


def _borders(batch: Batch) -> list[int]:
    """Ascending row numbers that separate documents, and stretches of padding, in the flattened (B * T) rows."""
    rows = batch.input_ids.numel()
    return sorted({0, rows, *(border for span in batch.document_spans() for border in span)})


def _find_layers(decoder: nn.Module, num_layers: int) -> nn.ModuleList:
    for module in decoder.children():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise InputError(f"no list of {num_layers} decoder layers in {type(decoder).__name__}: not supported yet")
