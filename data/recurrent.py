"""Layers whose memory is a state that every token changes (gated delta rule and the like) instead of a list of keys.

Such a state cannot forget the drafts that verification rejects. So a step leaves the committed state as it is, and
keeps what entered the layer beside the state after all rows; `commit` takes that state where all rows were kept, and
reads the kept rows once more where they were not. The layers are transformers' own: `Passage` is what they ask a cache
for.

Shape letters: B = sequences, M = rows of one step, D = hidden size, C = channels and W = width of the convolution.
"""

from typing import Any

import torch
from torch import Tensor, nn

from conf import InputError

KIND = "linear_attention"
"""Of such a layer, in transformers' `layer_types`."""


def mixers(layers: nn.ModuleList, kinds: list[str]) -> dict[int, nn.Module]:
    """The modules with such a state, by the number of their layer.

    Raises:
        InputError: if one of these layers has none that is known.
    """
    found: dict[int, nn.Module] = {}
    for number, (layer, kind) in enumerate(zip(layers, kinds, strict=False)):
        if kind == KIND:
            if not hasattr(layer, "linear_attn"):
                raise InputError(f"{type(layer).__name__} is a {KIND} layer of an unknown kind: not supported yet")
            found[number] = layer.get_submodule("linear_attn")
    return found


class Passage:
    """One layer's state before and after some rows: the cache, for one call of the layer."""

    def __init__(self, before: dict[str, Tensor]) -> None:
        self.before = before
        self.after: dict[str, Tensor] = {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """(B, C, W): the last inputs of the convolution; None before the first row."""
        return self.before.get(f"conv{state_idx}")

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The state; None before the first row."""
        return self.before.get(f"state{state_idx}")

    def is_recording_past(self, layer_idx: int) -> bool:
        """True: single rows must not change the convolution's state in place either."""
        return True

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int
    ) -> Tensor:
        """(B, C, M) new inputs of the convolution -> all that it has to see."""
        before = self.get_conv_state(layer_idx, state_idx)
        seen = conv_states if before is None else torch.cat([before, conv_states], dim=-1)
        missing = max(0, conv_kernel_size - seen.shape[-1])  # a text begins with zeros
        self.after[f"conv{state_idx}"] = nn.functional.pad(seen, (missing, 0))[..., -conv_kernel_size:]
        return seen

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        """The state after all rows."""
        self.after[f"state{state_idx}"] = recurrent_states
        return recurrent_states


class RunningState:
    """One layer's states of B sequences: what is committed, and the step that is not yet."""

    def __init__(self, mixer: nn.Module) -> None:
        self._mixer: Any = mixer
        self._committed: dict[str, Tensor] = {}
        self._step: tuple[Tensor, Passage] | None = None

    def enter(self, rows: Tensor) -> Passage:
        """A step begins: (B, M, D) hidden states enter the layer, which is to be given the returned cache."""
        self._step = rows, Passage(self._committed)
        return self._step[1]

    def commit(self, counts: Tensor) -> None:
        """Keep the first `counts` (B,) rows of the step."""
        assert self._step is not None  # a step came before
        rows, passage = self._step
        if bool((counts == rows.shape[1]).all()):
            self._committed = passage.after
            return
        after = {name: torch.zeros_like(state) for name, state in passage.after.items()}
        for count in sorted(set(counts.tolist())):
            chosen = counts == count
            again = Passage({name: state[chosen] for name, state in self._committed.items()})
            if count:
                self._mixer(hidden_states=rows[chosen, :count], cache=again)
            for name, state in (again.after or again.before).items():
                after[name][chosen] = state
        self._committed = after

    def keep(self, sequences: Tensor) -> None:
        """Forget all but the given sequences (B',)."""
        self._committed = {name: state[sequences] for name, state in self._committed.items()}
