"""Whether states are finite, at the speed of memory: by the bits of their exponents, without a copy in float32."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from vllm_compat.types import Tensor

__all__ = ["DTYPES", "dtype_name", "find_nonfinite"]

# dtype -> the integer of the same width, all bits but the sign, and the least of these that is no finite value
_BITS = {
    "bfloat16": ("uint16", 0x7FFF, 0x7F80),
    "float16": ("uint16", 0x7FFF, 0x7C00),
    "float32": ("uint32", 0x7FFF_FFFF, 0x7F80_0000),
}
DTYPES = frozenset(_BITS)
"""Those that states may have on disk."""
_BYTES_AT_ONCE = 1 << 17  # a part and its masked copy stay in a core's own cache


def dtype_name(states: Tensor) -> str:
    """``"bfloat16"`` and the like, of torch's tensors and numpy's arrays."""
    return str(states.dtype).removeprefix("torch.")


def find_nonfinite(states: Tensor) -> tuple[int, int] | None:
    """Token and layer, by position, of the first state that is not finite; None when all are.

    Args:
        states: [tokens, layers, hidden_size], torch's or numpy's.
    """
    numpy: Any = import_module("numpy")
    integer, mask, limit = _BITS[dtype_name(states)]
    bits = _bits(states, integer)
    flat = bits.reshape(-1)
    step = _BYTES_AT_ONCE // flat.itemsize
    part = numpy.empty(step, dtype=integer)
    for begin in range(0, flat.size, step):
        some = flat[begin : begin + step]
        if numpy.bitwise_and(some, mask, out=part[: some.size]).max() >= limit:
            tokens_before = begin // (bits.shape[1] * bits.shape[2])
            tokens, layers = ((bits[tokens_before:] & mask) >= limit).any(-1).nonzero()
            return tokens_before + int(tokens[0]), int(layers[0])
    return None


def _bits(states: Tensor, integer: str) -> Any:
    numpy: Any = import_module("numpy")
    if type(states).__module__.partition(".")[0] == "torch":
        torch: Any = import_module("torch")
        signed = {"uint16": torch.int16, "uint32": torch.int32}[integer]
        return states.contiguous().view(signed).numpy().view(integer)
    return numpy.ascontiguousarray(states).view(integer)
