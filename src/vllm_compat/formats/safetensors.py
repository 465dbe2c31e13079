"""``safetensors``: one file for each sample, all layers in one tensor; and what other formats of that library share."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from vllm_compat.extract.files import safetensors_parts
from vllm_compat.extract.tensors import int64_blob
from vllm_compat.formats.base import Format, SampleData, SampleFileError, SampleRow
from vllm_compat.formats.blobs import SafetensorsFile, open_safetensors, tensor_blob
from vllm_compat.types import NORM, LayerId, Tensor

__all__ = ["PerLayer", "Safetensors", "SafetensorsFormat", "parse_layer_ids"]


class SafetensorsFormat(Format):
    """``token_ids`` int64, ``loss_mask`` int64 where the row has one, the states; text in the file's own metadata."""

    @abstractmethod
    def pack(self, sample: SampleData) -> Mapping[str, Tensor]:
        """The states under the format's own names, those of wider elements first."""

    @abstractmethod
    def unpack(self, file: SafetensorsFile, layer_ids: tuple[LayerId, ...]) -> Tensor:
        """The states [tokens, layers, hidden_size] as they were packed."""

    def text(self, sample: SampleData) -> dict[str, str]:
        """What the metadata says."""
        return sample.file_metadata()

    def encode(self, sample: SampleData) -> list[bytes | memoryview]:
        return self.parts(sample, self.pack(sample))

    def parts(self, sample: SampleData, packed: Mapping[str, Tensor]) -> list[bytes | memoryview]:
        """The whole file, with the states as they were packed."""
        blobs = {"token_ids": int64_blob(sample.token_ids)}
        if sample.loss_mask is not None:
            blobs["loss_mask"] = int64_blob(sample.loss_mask)
        blobs |= {name: tensor_blob(tensor) for name, tensor in packed.items()}
        return safetensors_parts(blobs, self.text(sample))

    def decode(self, path: Path, entry_index: int) -> SampleData:
        with open_safetensors(path) as file:
            row = _row(file)
            layer_ids = parse_layer_ids(file.metadata, path)
            return SampleData(
                index=entry_index,
                id=file.metadata.get("sample_id"),
                token_ids=row.token_ids,
                loss_mask=row.loss_mask,
                layer_ids=layer_ids,
                hidden_states=self.unpack(file, layer_ids),
                metadata=file.metadata,
            ).checked(path)

    def row(self, path: Path) -> SampleRow:
        with open_safetensors(path) as file:
            return _row(file)


class Safetensors(SafetensorsFormat):
    """``hidden_states`` [tokens, layers, hidden_size]."""

    name: ClassVar[str] = "safetensors"
    description: ClassVar[str] = "hs_{i}.safetensors: hidden_states [tokens, layers, hidden], token_ids, loss_mask"
    readers: ClassVar[str] = "any safetensors"

    def file(self, index: int, sample_id: str | None) -> PurePosixPath:
        return PurePosixPath(f"hs_{index}.safetensors")

    def pack(self, sample: SampleData) -> Mapping[str, Tensor]:
        return {"hidden_states": sample.hidden_states}

    def unpack(self, file: SafetensorsFile, layer_ids: tuple[LayerId, ...]) -> Tensor:
        return file.tensor("hidden_states")


class PerLayer(SafetensorsFormat):
    """``layer_{k}`` and ``norm``, each [tokens, hidden_size]."""

    name: ClassVar[str] = "per-layer"
    description: ClassVar[str] = "hs_{i}.safetensors: layer_{k} and norm [tokens, hidden], token_ids, loss_mask"
    readers: ClassVar[str] = "any safetensors"

    def file(self, index: int, sample_id: str | None) -> PurePosixPath:
        return PurePosixPath(f"hs_{index}.safetensors")

    def pack(self, sample: SampleData) -> Mapping[str, Tensor]:
        return {_tensor_name(k): sample.hidden_states[:, at] for at, k in enumerate(sample.layer_ids)}

    def unpack(self, file: SafetensorsFile, layer_ids: tuple[LayerId, ...]) -> Tensor:
        states = [file.tensor(_tensor_name(k)) for k in layer_ids]
        if not states or any(state.shape != states[0].shape for state in states):
            raise SampleFileError(f"{file.path}: states of the shapes {[tuple(state.shape) for state in states]}")
        library: Any = import_module(type(states[0]).__module__.partition(".")[0])  # torch or numpy
        return library.stack(states, 1)


def parse_layer_ids(metadata: Mapping[str, str], path: Path) -> tuple[LayerId, ...]:
    """The layer ids that a file's metadata names.

    Raises:
        SampleFileError: it names none.
    """
    try:
        found = json.loads(metadata["layer_ids"])
    except (KeyError, ValueError) as error:
        raise SampleFileError(f"{path}: its metadata has no layer_ids that can be read: {error!r}") from error
    if not isinstance(found, list) or any(type(k) is not int and k != NORM for k in found):
        raise SampleFileError(f"{path}: layer_ids in its metadata are {found!r}, not a list of layer ids")
    return tuple(found)


def _row(file: SafetensorsFile) -> SampleRow:
    return SampleRow(
        token_ids=file.integers("token_ids"),
        loss_mask=file.integers("loss_mask") if "loss_mask" in file.names else None,
    )


def _tensor_name(layer_id: LayerId) -> str:
    return NORM if layer_id == NORM else f"layer_{layer_id}"
