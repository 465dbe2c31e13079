"""How samples lie on disk: one module for each format, imported when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

from vllm_compat.errors import UsageError
from vllm_compat.formats.base import Entry, Format, Row, SampleData, SampleFileError, SampleRow, SealedRun

__all__ = [
    "FORMATS",
    "Entry",
    "Format",
    "Row",
    "SampleData",
    "SampleFileError",
    "SampleRow",
    "SealedRun",
    "get_format",
]

FORMATS: Mapping[str, str] = MappingProxyType(
    {
        "safetensors": "vllm_compat.formats.safetensors:Safetensors",
        "per-layer": "vllm_compat.formats.safetensors:PerLayer",
        "speculators": "vllm_compat.formats.speculators:Speculators",
        "speculators-fp8": "vllm_compat.formats.speculators_fp8:SpeculatorsFp8",
        "speculators-v1": "vllm_compat.formats.speculators_v1:SpeculatorsV1",
        "specforge": "vllm_compat.formats.specforge:SpecForge",
        "modelopt": "vllm_compat.formats.modelopt:ModelOpt",
        "eagle": "vllm_compat.formats.eagle:Eagle",
    }
)
"""Name of a format -> ``module:Class``."""


def get_format(name: str) -> Format:
    """The format of that name.

    Raises:
        UsageError: there is none.
    """
    if name not in FORMATS:
        raise UsageError(f"there is no format {name!r}; the formats are {', '.join(FORMATS)}")
    module, _, kind = FORMATS[name].partition(":")
    found = getattr(import_module(module), kind)()
    assert isinstance(found, Format)
    return found
