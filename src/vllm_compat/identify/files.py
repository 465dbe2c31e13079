"""Samples in files of any tool: token ids, and every tensor that can be a state."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from vllm_compat.errors import UsageError, VllmCompatError
from vllm_compat.types import Tensor

__all__ = ["ForeignFileError", "ForeignSample", "choose_files", "read_sample"]

_SUFFIXES = (".pt", ".ckpt", ".safetensors")
_SAMPLE = re.compile(r"(?!.*token_freq).*\d[^/]*$|.*(?:data|hs|sample|conv)[^/]*$")  # what has a number, or such a name
_TOKENS = ("input_ids", "token_ids")


class ForeignFileError(VllmCompatError):
    """A file that is no sample, or not like the others.

    Attributes:
        path: of the file.
    """

    exit_code = 4

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path


@dataclass(frozen=True, slots=True)
class ForeignSample:
    """One file.

    Attributes:
        path: of the file.
        token_ids: its tokens.
        entries: ``hidden_states[1]`` -> a state [tokens, hidden_size], float32; in the order of the file.
    """

    path: Path
    token_ids: tuple[int, ...]
    entries: Mapping[str, Tensor] = field(repr=False)


def choose_files(folder: Path, count: int, seed: int) -> tuple[list[Path], int]:
    """So many files of samples below a folder, at random; and how many there are.

    Raises:
        UsageError: there is none.
    """
    found = sorted(p for p in folder.rglob("*") if p.suffix in _SUFFIXES and _SAMPLE.match(p.name) and p.is_file())
    if not found:
        raise UsageError(f"{folder} has no samples: no file that ends in {', '.join(_SUFFIXES)} and has a number")
    return sorted(random.Random(seed).sample(found, min(count, len(found)))), len(found)


def read_sample(path: Path, hidden_size: int) -> ForeignSample:
    """Read a file; no code in it is run.

    Args:
        path: what ``torch.save`` or safetensors wrote: a dictionary of tensors, or of lists of them.
        hidden_size: width of a state of the model; wider tensors are several of them side by side.

    Raises:
        ForeignFileError: it cannot be read, or has no tokens or no states of that width.
    """
    try:
        fields = _load(path)
        token_ids = next((_row(fields[name]) for name in _TOKENS if name in fields), None)
        if token_ids is None:
            raise ValueError(f"it has none of {', '.join(_TOKENS)}, only {', '.join(map(str, fields))}")
        entries = {n: t for name, value in fields.items() for n, t in _states(str(name), value, hidden_size)}
        wrong = {n: tuple(t.shape) for n, t in entries.items() if len(t) != len(token_ids)}
        if wrong or not entries:
            raise ValueError(f"{wrong or 'no tensor'} of width {hidden_size} for {len(token_ids)} tokens")
    except Exception as error:  # whatever the readers raise for what is no such file
        raise ForeignFileError(f"{type(error).__name__}: {error}", path=str(path)) from error
    return ForeignSample(path, token_ids, entries)


def _load(path: Path) -> Mapping[Any, Any]:
    if path.suffix == ".safetensors":
        loaded: Any = import_module("safetensors.torch").load_file(path)
    else:
        loaded = import_module("torch").load(path, map_location="cpu", weights_only=True)
    if not isinstance(loaded, Mapping):
        raise TypeError(f"it holds a {type(loaded).__name__}, wanted a dictionary")
    found: Mapping[Any, Any] = loaded
    return found


def _row(value: Any) -> tuple[int, ...]:
    """Token ids, without the dimension of a batch of one."""
    torch: Any = import_module("torch")
    tensor = torch.as_tensor(value)
    return tuple(map(int, (tensor[0] if tensor.ndim == 2 and len(tensor) == 1 else tensor).tolist()))


def _states(name: str, value: Any, hidden_size: int) -> Iterator[tuple[str, Tensor]]:
    torch: Any = import_module("torch")
    if isinstance(value, (list, tuple)):
        for at, part in enumerate(cast("list[Any]", value)):
            yield from _states(f"{name}[{at}]", part, hidden_size)
        return
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.ndim < 2:
        return
    if value.dtype.itemsize == 1:
        raise ValueError(f"{name} is {value.dtype}, which means nothing without its scales")
    if value.shape[-1] % hidden_size:
        return
    rows = value[0] if value.ndim == 3 and len(value) == 1 else value
    parts = rows.reshape(len(rows), -1, hidden_size).float()
    for at in range(parts.shape[1]):
        yield (f"{name}[{at}]" if parts.shape[1] > 1 else name), parts[:, at]
