"""``speculators-fp8``: the same in float8, half the size, for the one reader that decodes it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from vllm_compat.errors import CaptureError
from vllm_compat.formats.archive import as_torch
from vllm_compat.formats.base import SampleData, SampleFileError
from vllm_compat.formats.blobs import SafetensorsFile, open_safetensors
from vllm_compat.formats.once import warn_once
from vllm_compat.formats.speculators import Speculators
from vllm_compat.types import LayerId, Tensor

__all__ = ["SpeculatorsFp8", "dequantize", "quantize"]

_STATES, _SCALES = "hidden_states", "hidden_states_scales"
_MOST = 448.0  # of float8_e4m3fn
_LEAST_EXPONENT = -117  # with it even the least subnormal, 2**-9, is a normal bfloat16


class SpeculatorsFp8(Speculators):
    """``hidden_states`` float8_e4m3fn, and ``hidden_states_scales`` float32 [tokens, layers, 1].

    The scales are powers of two, so that a state times its scale is a bfloat16 without rounding. Each layer has its
    own, so that a layer of small values keeps them beside one of large ones.

    Decoding gives the dequantised states, in bfloat16, and the key ``quantized`` in the metadata.
    """

    name: ClassVar[str] = "speculators-fp8"
    description: ClassVar[str] = "as speculators, states in float8 with a scale for each token and layer"
    readers: ClassVar[str] = "speculators 0.9.0 with --hidden-states-backend fp8, and nothing else"

    def check(self, layer_ids: tuple[LayerId, ...], num_layers: int | None) -> None:
        super().check(layer_ids, num_layers)
        warn_once(
            f"format {self.name} is read right by speculators 0.9.0 with --hidden-states-backend fp8 alone. Without "
            "that option, and by 0.5 to 0.8, the scales are ignored: wrong states, and no error"
        )

    def pack(self, sample: SampleData) -> Mapping[str, Tensor]:
        quantized, scales = quantize(as_torch(sample.hidden_states))
        return {_SCALES: scales, _STATES: quantized}

    def encode_copy(self, sample: SampleData, states_of: Path) -> list[bytes | memoryview]:
        with open_safetensors(states_of) as file:  # quantizing again may take another scale
            return self.parts(sample, {name: file.tensor(name) for name in (_SCALES, _STATES)})

    def unpack(self, file: SafetensorsFile, layer_ids: tuple[LayerId, ...]) -> Tensor:
        quantized, scales = file.tensor(_STATES), file.tensor(_SCALES)
        if scales.shape != (*quantized.shape[:-1], 1):
            raise SampleFileError(f"{file.path}: scales {tuple(scales.shape)} for states {tuple(quantized.shape)}")
        return dequantize(quantized, scales)

    def text(self, sample: SampleData) -> dict[str, str]:
        return sample.file_metadata() | {"quantized": "float8_e4m3fn"}


def quantize(states: Tensor) -> tuple[Tensor, Tensor]:
    """States [tokens, layers, hidden_size] as float8_e4m3fn, and their scales, float32 [tokens, layers, 1].

    Raises:
        CaptureError: a value that is not finite, or whose scaled neighbour in float8 no bfloat16 can hold.
    """
    torch: Any = import_module("torch")
    exact = states.float()
    most = exact.abs().amax(-1, keepdim=True)
    if not (most < 2.0**127).all():
        raise CaptureError("states that are not finite, or above 2**127, have no place in float8")
    fraction, exponent = torch.frexp(most / _MOST)  # the scale is the least power of two that keeps it within _MOST
    exponent = (exponent - (fraction == 0.5).to(exponent.dtype)).clamp(min=_LEAST_EXPONENT)
    scales = torch.ldexp(torch.ones_like(most), exponent)
    return (exact / scales).to(torch.float8_e4m3fn), scales


def dequantize(quantized: Tensor, scales: Tensor) -> Tensor:
    """The states in bfloat16, without rounding."""
    torch: Any = import_module("torch")
    return quantized.to(torch.bfloat16) * scales.to(torch.bfloat16)
