"""From an engine's tensors to bytes on disk: torch's tensors and numpy's arrays, neither imported before it is met."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from vllm_compat._stacked import stacked
from vllm_compat.errors import NonFiniteError, UsageError
from vllm_compat.extract.config import SaveDtype
from vllm_compat.types import LayerId, Tensor

__all__ = ["Blob", "int64_blob", "stack_states"]

_INFINITE = float("inf")
_EXPONENT = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}  # of a value that is not finite
_CHUNK = 1 << 19  # values that a core's own memory holds, so that they are fetched once


@dataclass(frozen=True, slots=True)
class Blob:
    """A tensor as a file has it.

    Attributes:
        dtype: as safetensors spells it.
        shape: its dimensions.
        data: its bytes, in C order and little-endian.
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview = field(repr=False)


def int64_blob(values: Sequence[int]) -> Blob:
    """Integers as [len(values)]."""
    return Blob("I64", (len(values),), memoryview(struct.pack(f"<{len(values)}q", *values)))


def stack_states(states: Sequence[Tensor], layer_ids: Sequence[LayerId], save_dtype: SaveDtype) -> Tensor:
    """The states of one sample as one tensor [tokens, layers, hidden_size]; no copy where they are that already.

    Args:
        states: for each layer a tensor [tokens, hidden_size] on the CPU.
        layer_ids: their names, for the message.
        save_dtype: of the result. numpy, which has no bfloat16, is saved in float32 whatever was asked.

    Raises:
        NonFiniteError: values that are not finite, also where they only are not in the dtype of the result.
        UsageError: neither torch's tensors nor numpy's arrays.
    """
    package = type(states[0]).__module__.partition(".")[0]
    if package == "torch":
        torch: Any = import_module("torch")
        dtype = states[0].dtype if save_dtype == "auto" else getattr(torch, save_dtype)
        whole = stacked(states)
        stack = torch.stack([tensor.to(dtype) for tensor in states], dim=1) if whole is None else whole.to(dtype)
    elif package == "numpy":
        stack = import_module("numpy").stack([array.astype("float32") for array in states], axis=1)
    else:
        raise UsageError(f"states are {type(states[0]).__name__}; only torch's tensors and numpy's arrays can be saved")
    _check_finite(stack, layer_ids)
    return stack


def _check_finite(stack: Tensor, layer_ids: Sequence[LayerId]) -> None:
    if _all_finite(stack):
        return
    for at, layer_id in enumerate(layer_ids):  # a layer at a time: the comparison needs memory of its own
        good = (abs(stack[:, at]) < _INFINITE).all(-1)
        if not good.all():
            raise NonFiniteError(f"layer id {layer_id}: the state of token {good.tolist().index(False)} is not finite")


def _all_finite(stack: Tensor) -> bool:
    """In one pass over the memory, and on this thread alone.

    torch would share it out over all cores. Its threads go on turning for a while when they have nothing more to do,
    and keep the thread that feeds the device from its core: 4 ms of a step of 196 (8B, 16 cores, four writers). A value
    that is not finite has an exponent of ones alone: its bits are the greatest numbers of their sign, as integers.
    """
    bits = _EXPONENT.get(str(stack.dtype).removeprefix("torch."))
    if bits is None or not getattr(stack, "is_contiguous", lambda: False)():
        least, most = float(stack.min()), float(stack.max())  # both are NaN where one value is
        return abs(least) < _INFINITE and abs(most) < _INFINITE
    torch: Any = import_module("torch")
    size = stack.element_size()
    sign = 1 << (8 * size - 1)
    signed = stack.reshape(-1).view(getattr(torch, f"int{8 * size}")).numpy()
    unsigned = signed.view(f"u{size}")
    return all(
        signed[begin : begin + _CHUNK].max() < bits and unsigned[begin : begin + _CHUNK].max() < sign + bits
        for begin in range(0, len(signed), _CHUNK)
    )
