"""Layers' states as one tensor [tokens, layers, hidden_size], and that tensor as layers' states."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_compat.types import Tensor

__all__ = ["columns", "stacked"]


def columns(stack: Tensor) -> tuple[Tensor, ...]:
    """For each layer a view [tokens, hidden_size] of ``stack``."""
    return tuple(stack[:, layer] for layer in range(stack.shape[1]))


def stacked(states: Sequence[Tensor]) -> Tensor | None:
    """The tensor whose ``columns`` these are, in this order, without a copy; None where they are no such columns."""
    first = states[0]
    if not hasattr(first, "as_strided") or first.dim() != 2:
        return None
    (tokens, width), layers = first.shape, len(states)
    step = width * first.element_size()
    for layer, state in enumerate(states):
        if (
            state.dtype != first.dtype
            or state.shape != first.shape
            or state.stride() != (layers * width, 1)
            or state.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
            or state.data_ptr() != first.data_ptr() + layer * step
        ):
            return None
    return first.as_strided((tokens, layers, width), (layers * width, width, 1))
