"""Formats whose files are archives of ``torch.save``: a dictionary of tensors, readable with ``weights_only=True``."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any, cast

from vllm_compat.errors import UsageError
from vllm_compat.formats.base import Format, SampleData, SampleFileError, SampleRow
from vllm_compat.formats.safetensors import parse_layer_ids
from vllm_compat.types import LayerId, Tensor

__all__ = ["ArchiveFormat", "as_torch", "saved"]

_NO_MASK = "loss_mask_absent"
"""Key of the metadata for a row without a loss mask: these formats all want one, and get ones."""


class ArchiveFormat(Format):
    """``input_ids`` and ``loss_mask`` int64 [tokens], the states as the format has them, and ``metadata``.

    ``metadata`` is a dictionary of text, which every reader known here passes over. Without a loss mask in the row
    all of it is ones.
    """

    def check(self, layer_ids: tuple[LayerId, ...], num_layers: int | None) -> None:
        if not find_spec("torch"):
            raise UsageError(f"format {self.name} is written by torch, which is not installed here")

    @abstractmethod
    def pack(self, sample: SampleData, states: Tensor) -> dict[str, Any]:
        """The states [tokens, layers, hidden_size] under the format's own keys; tensors of their own, no views."""

    @abstractmethod
    def unpack(self, fields: dict[str, Any], num_layers: int) -> Tensor:
        """The states as they were packed."""

    def encode(self, sample: SampleData) -> list[bytes | memoryview]:
        torch: Any = import_module("torch")
        no_mask = {_NO_MASK: "true"} if sample.loss_mask is None else {}
        mask = sample.loss_mask or (1,) * len(sample.token_ids)
        fields = {
            "input_ids": torch.tensor(sample.token_ids, dtype=torch.int64),
            "loss_mask": torch.tensor(mask, dtype=torch.int64),
            **self.pack(sample, as_torch(sample.hidden_states)),
            "metadata": sample.file_metadata() | no_mask,
        }
        return [saved(_same_objects(fields))]

    def decode(self, path: Path, entry_index: int) -> SampleData:
        with self._open(path) as fields:
            row = _row(fields)
            layer_ids = parse_layer_ids(fields["metadata"], path)
            return SampleData(
                index=entry_index,
                id=fields["metadata"].get("sample_id"),
                token_ids=row.token_ids,
                loss_mask=row.loss_mask,
                layer_ids=layer_ids,
                hidden_states=self.unpack(fields, len(layer_ids)),
                metadata=fields["metadata"],
            ).checked(path)

    def row(self, path: Path) -> SampleRow:
        with self._open(path) as fields:
            return _row(fields)

    @contextmanager
    def _open(self, path: Path) -> Generator[dict[str, Any], None, None]:
        """What a file has; its tensors are read when they are touched."""
        torch: Any = _torch()
        try:
            yield torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except SampleFileError:
            raise
        except Exception as error:  # whatever torch makes of bytes that are no archive, or of other contents
            raise SampleFileError(f"{path} cannot be read as {self.name}: {error!r}") from error


def as_torch(tensor: Tensor) -> Tensor:
    """A torch tensor of either kind."""
    torch: Any = import_module("torch")
    return tensor if isinstance(tensor, torch.Tensor) else torch.from_numpy(tensor)


def saved(value: Any) -> memoryview:
    """The bytes of an archive, in memory: the file is written by ``write_whole``, which knows of full disks."""
    torch: Any = import_module("torch")
    buffer = BytesIO()
    torch.save(value, buffer)
    return buffer.getbuffer()


def _same_objects(value: Any) -> Any:
    """The value with one object for equal texts: an archive refers back to objects, so else its bytes would vary."""
    if isinstance(value, dict):
        found = cast("dict[str, Any]", value)
        return {sys.intern(key): _same_objects(each) for key, each in found.items()}
    return sys.intern(value) if type(value) is str else value


def _row(fields: dict[str, Any]) -> SampleRow:
    return SampleRow(
        token_ids=tuple(fields["input_ids"].tolist()),
        loss_mask=None if _NO_MASK in fields["metadata"] else tuple(fields["loss_mask"].tolist()),
    )


def _torch() -> Any:
    try:
        return import_module("torch")
    except ImportError as error:
        raise UsageError(f"reading this format takes torch, which is not installed: {error}") from error
