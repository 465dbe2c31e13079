"""From an engine's tensors to bytes on disk: torch's tensors and numpy's arrays, neither imported before it is met."""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from vllm_compat.errors import CaptureError, UsageError
from vllm_compat.extract.config import SaveDtype
from vllm_compat.types import LayerId, Tensor

__all__ = ["Blob", "int64_blob", "states_blob"]

_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


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


def states_blob(states: Sequence[Tensor], layer_ids: Sequence[LayerId], save_dtype: SaveDtype) -> Blob:
    """The states of one sample as [tokens, layers, hidden_size].

    Args:
        states: for each layer a tensor [tokens, hidden_size] on the CPU.
        layer_ids: their names, for the message.
        save_dtype: of the result. numpy, which has no bfloat16, is saved in float32 whatever was asked.

    Raises:
        CaptureError: values that are not finite, also where they only are not in the dtype of the result.
        UsageError: neither torch's tensors nor numpy's arrays, a dtype that is not saved, or a big-endian host.
    """
    if sys.byteorder != "little":
        raise UsageError("this host is big-endian; files are written on little-endian hosts only")
    package = type(states[0]).__module__.partition(".")[0]
    if package == "torch":
        torch: Any = import_module("torch")
        dtype = states[0].dtype if save_dtype == "auto" else getattr(torch, save_dtype)
        stacked = torch.stack([tensor.to(dtype) for tensor in states], dim=1).contiguous()
        name, raw = str(dtype).removeprefix("torch."), stacked.view(torch.uint8).numpy()
    elif package == "numpy":
        numpy: Any = import_module("numpy")
        stacked = raw = numpy.stack([array.astype("float32") for array in states], axis=1)
        name = "float32"
    else:
        raise UsageError(f"states are {type(states[0]).__name__}; only torch's tensors and numpy's arrays can be saved")
    if name not in _NAMES:
        raise UsageError(f"states are {name}, which is not saved as it is; use --save-dtype bfloat16 or float32")
    _check_finite(stacked, layer_ids)
    return Blob(_NAMES[name], tuple(stacked.shape), memoryview(raw).cast("B"))


def _check_finite(stacked: Tensor, layer_ids: Sequence[LayerId]) -> None:
    for at, layer_id in enumerate(layer_ids):  # a layer at a time: the comparison needs memory of its own
        good = (abs(stacked[:, at]) < float("inf")).all(-1)
        if not good.all():
            raise CaptureError(f"layer id {layer_id}: the state of token {good.tolist().index(False)} is not finite")
