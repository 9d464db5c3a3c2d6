"""The states that enter chosen layers of a target, caught while it runs. Shape letters as in `data.target`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from data.batch import TargetFeatures, Wants


class _EnoughError(Exception):
    """Everything that was wanted has been seen: no need to run the rest."""


class LayerInputs:
    """Hooks on a target's layers, there only while `recording`."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        """Take the layers, and the norm after the last one as a layer of its own."""
        self._layers = layers
        self._states: dict[int, Tensor] = {}

    @contextmanager
    def recording(self, wants: Wants, stop_early: bool) -> Iterator[None]:
        """Record the wanted states while the context is open.

        Args:
            wants: which.
            stop_early: leave the context at the last wanted layer if no last hidden state is wanted.
        """

        def record(index: int, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            self._states[index] = args[0] if args else kwargs["hidden_states"]
            if stop_early and not wants.last_hidden_state and index == wants.aux_layers[-1]:
                raise _EnoughError

        handles = [
            self._layers[i].register_forward_pre_hook(
                lambda _module, args, kwargs, i=i: record(i, args, kwargs), with_kwargs=True
            )
            for i in wants.aux_layers
        ]
        try:
            yield
        except _EnoughError:
            pass
        finally:
            for handle in handles:
                handle.remove()

    def features(self, last_hidden_state: Tensor | None, wants: Wants) -> TargetFeatures:
        """What the last run left, handed over: side by side, and `last_hidden_state` if it is wanted."""
        states = [self._states.pop(i) for i in wants.aux_layers]
        if not states:
            assert last_hidden_state is not None  # nothing stops a run early in which no layer is wanted
            states = [last_hidden_state[..., :0]]
        return TargetFeatures(
            aux_hidden_states=torch.cat(states, dim=-1),
            last_hidden_state=last_hidden_state if wants.last_hidden_state else None,
        )
