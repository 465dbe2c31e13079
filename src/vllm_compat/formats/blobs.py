"""Tensors to the bytes of a safetensors file and back: torch's where it is installed, else numpy's float32."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_compat.errors import UsageError, VllmCompatError
from vllm_compat.extract.tensors import Blob
from vllm_compat.formats.base import SampleFileError
from vllm_compat.types import Tensor

__all__ = ["SafetensorsFile", "open_safetensors", "tensor_blob"]

_NAMES = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float8_e4m3fn": "F8_E4M3",
}


def tensor_blob(tensor: Tensor) -> Blob:
    """The bytes of a tensor on the CPU, in C order; copied only where they lie in another.

    Raises:
        UsageError: neither torch's tensor nor numpy's array, a dtype that is not saved, or a big-endian host.
    """
    if sys.byteorder != "little":
        raise UsageError("this host is big-endian; files are written on little-endian hosts only")
    package = type(tensor).__module__.partition(".")[0]
    if package not in ("torch", "numpy"):
        raise UsageError(f"states are {type(tensor).__name__}; only torch's tensors and numpy's arrays can be saved")
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _NAMES:
        raise UsageError(f"states are {dtype}, which is not saved as it is; use --save-dtype bfloat16 or float32")
    if package == "torch":
        torch: Any = import_module("torch")
        raw = tensor.contiguous().view(torch.uint8).numpy()
    else:
        raw = import_module("numpy").ascontiguousarray(tensor)
    return Blob(_NAMES[dtype], tuple(tensor.shape), memoryview(raw).cast("B"))


class SafetensorsFile:
    """An open safetensors file: its text, and its tensors when asked for."""

    def __init__(self, path: Path, file: Any) -> None:
        self.path = path
        self._file = file
        self.names: frozenset[str] = frozenset(file.keys())
        self.metadata: dict[str, str] = dict(file.metadata() or {})

    def tensor(self, name: str) -> Tensor:
        """One tensor.

        Raises:
            SampleFileError: the file has none of that name.
        """
        if name not in self.names:
            raise SampleFileError(f"{self.path} has no tensor {name!r}; it has {', '.join(sorted(self.names))}")
        return self._file.get_tensor(name)

    def integers(self, name: str) -> tuple[int, ...]:
        """A tensor [n] of integers.

        Raises:
            SampleFileError: the file has none of that name, or it is something else.
        """
        values = self.tensor(name).tolist()
        if not isinstance(values, list) or any(type(value) is not int for value in values):
            raise SampleFileError(f"{self.path}: {name} is no list of integers")
        return tuple(values)


@contextmanager
def open_safetensors(path: Path) -> Generator[SafetensorsFile, None, None]:
    """A safetensors file, read with the library of that name.

    Raises:
        SampleFileError: it is missing, damaged, or nothing of the kind.
        UsageError: the library is not installed, or torch is not and the file has values that numpy has no type for.
    """
    library = _library("safetensors")
    framework = "pt" if find_spec("torch") else "numpy"
    try:
        with library.safe_open(str(path), framework=framework) as file:
            yield SafetensorsFile(path, file)
    except VllmCompatError:
        raise
    except TypeError as error:  # what safetensors says for a dtype that numpy lacks
        if framework == "pt":
            raise SampleFileError(f"{path} cannot be read: {error}") from error
        raise UsageError(f"{path} cannot be read without torch: {error}. Install torch") from error
    except (OSError, ValueError, library.SafetensorError) as error:
        raise SampleFileError(f"{path} cannot be read: {error}") from error


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise UsageError(f"reading this format takes the package {name}, which is not installed: {error}") from error
