"""Which side of the final norm a state is from: undone, the norm leaves a state of length one, and no other does."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_compat.convert.norm import FinalNorm
from vllm_compat.types import NORM, LayerId, Tensor

__all__ = ["Sides", "lengths"]

_OFF = 0.005  # of a root mean square over hundreds of numbers, which rounding in bfloat16 moves by less than 0.001
_FEWEST = 3


def lengths(states: Tensor, norm: FinalNorm) -> Tensor:
    """For each state [n, hidden_size] the root mean square of what went into the norm, if it came out of it."""
    scale = norm.weight + (1.0 if norm.kind == "rms_plus_one" else 0.0)
    shift = 0.0 if norm.bias is None else norm.bias
    kept = scale.abs() > 1e-3 * scale.abs().max()
    return ((states - shift) / scale)[:, kept].square().mean(-1).sqrt()


class Sides:
    """Counts the states that a final norm can have put out."""

    def __init__(self, norms: Sequence[FinalNorm]) -> None:
        self._norms = norms
        self._unit = [0] * len(norms)
        self._longer = [0] * len(norms)
        self._count = 0

    def add(self, states: Tensor) -> None:
        """States [n, hidden_size] in float32."""
        self._count += states.shape[0]
        for at, norm in enumerate(self._norms):
            found = lengths(states, norm)
            self._unit[at] += int(((found - 1).abs() < _OFF).sum())
            self._longer[at] += int((found > 1 + _OFF).sum())

    def find_mix_up(self, layer_id: LayerId, agree: int) -> str | None:
        """The words for states that are from the other side of the norm than the run says; None for right ones.

        Args:
            layer_id: what the run says.
            agree: how many of them give the token that was sampled.
        """
        unit, count = max(self._unit), self._count
        if count < _FEWEST:
            return None
        if layer_id != NORM and unit > 0.9 * count:
            return (
                f"the last entry is post-norm, the run says pre-norm: undoing the final norm leaves length one for "
                f"{unit} of {count} states of layer id {layer_id}"
            )
        # Shorter than one, and right, are states of a model so small that the norm's epsilon shows.
        if layer_id == NORM and unit < 0.1 * count and (min(self._longer) > 0.9 * count or agree < 0.9 * count):
            return (
                f"the entry `{NORM}` is pre-norm, or of another layer: undoing the final norm leaves length one for "
                f"only {unit} of {count} states"
            )
        return None
