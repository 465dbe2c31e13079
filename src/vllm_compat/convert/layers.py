"""From the layers that a run has to those that are asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from vllm_compat.errors import UsageError
from vllm_compat.formats import SampleData
from vllm_compat.types import NORM, LayerId, Tensor

__all__ = ["Norm", "Selection", "select_layers"]

Norm: TypeAlias = Callable[[Tensor], Tensor]
"""The final norm of a model: [tokens, hidden_size] to the same."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which layers to take, and in which order.

    Attributes:
        layer_ids: the result's.
        places: for each of them, where it is among the run's; for a computed ``norm``, where the last layer is.
        norm: the norm to compute it with; None when it is not computed.
    """

    layer_ids: tuple[LayerId, ...]
    places: tuple[int, ...]
    norm: Norm | None

    def apply(self, sample: SampleData) -> SampleData:
        """The sample with these layers."""
        states = sample.hidden_states
        if self.places != tuple(range(states.shape[1])):
            states = states[:, list(self.places)]  # a copy
        metadata = {**sample.metadata, "post_norm": json.dumps([k == NORM for k in self.layer_ids])}
        if self.norm:
            at = self.layer_ids.index(NORM)
            if states is sample.hidden_states:
                states = states.clone()
            states[:, at] = self.norm(states[:, at])
            metadata["norm_computed"] = "from the last layer's state, with the checkpoint's weights"
        return replace(sample, layer_ids=self.layer_ids, hidden_states=states, metadata=metadata)


def select_layers(
    asked: tuple[LayerId, ...], have: tuple[LayerId, ...], num_layers: int | None, norm: Callable[[], Norm] | None
) -> Selection:
    """Find each layer that is asked for.

    Args:
        asked: the result's layer ids.
        have: the run's.
        num_layers: decoder layers of the model; None when not known.
        norm: loads the final norm; None without a model to load it from.

    Raises:
        UsageError: one that the run does not have and that cannot be computed; what ``norm`` raises.
    """
    top = None if num_layers is None else num_layers - 1

    def place(layer_id: LayerId) -> int:
        if layer_id in have:
            return have.index(layer_id)
        if layer_id == NORM and norm and top is not None and top in have:
            return have.index(top)
        raise UsageError(f"the run has no layer {layer_id}, only {_text(have)}. {_advice(layer_id, asked, have, top)}")

    places = tuple(place(layer_id) for layer_id in asked)
    computed = NORM in asked and NORM not in have
    return Selection(asked, places, norm() if computed and norm else None)


def _advice(layer_id: LayerId, asked: tuple[LayerId, ...], have: tuple[LayerId, ...], top: int | None) -> str:
    if layer_id == NORM and (top is None or top in have):
        return "The state after the final norm can be computed from the last layer's with --model"
    undone = "A norm cannot be undone: extract" if layer_id == top and NORM in have else "Extract"
    return f"{undone} again with --layer-ids {_text(asked)}"


def _text(layer_ids: tuple[LayerId, ...]) -> str:
    return " ".join(map(str, layer_ids))
