"""What a format is: one file for each sample, sidecars at the seal, and the way back.

A format knows no vLLM and no run. Nothing here imports torch, numpy or ``vllm_compat.extract``.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Protocol

from vllm_compat.errors import CaptureError
from vllm_compat.types import LayerId, Tensor

__all__ = [
    "LAYER_ID_CONVENTION",
    "Entry",
    "Format",
    "Row",
    "SampleData",
    "SampleFileError",
    "SampleRow",
    "SealedRun",
]

LAYER_ID_CONVENTION = "k = residual stream leaving decoder layer k, 0-based, before the final norm; norm = after it"


class SampleFileError(CaptureError):
    """A sample's file is missing, damaged, or not of its format."""


class Entry(Protocol):
    """A sample that is done, as the journal has it."""

    @property
    def index(self) -> int:
        """Its number among the samples."""
        ...

    @property
    def file(self) -> str:
        """Its file, relative to the run's folder; empty for a sample that was skipped."""
        ...

    @property
    def tokens(self) -> int:
        """How many it has."""
        ...

    @property
    def id(self) -> str | None:
        """The row's own id."""
        ...


class Row(Protocol):
    """A sample's row of the input, cut as it was for its states."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Its tokens."""
        ...

    @property
    def loss_mask(self) -> Sequence[int] | None:
        """0 or 1 for each of them."""
        ...


@dataclass(frozen=True, slots=True)
class SampleRow:
    """A ``Row`` that a file of samples has.

    Attributes:
        token_ids: its tokens.
        loss_mask: 0 or 1 for each of them; None when the input's row had none.
    """

    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, eq=False)
class SampleData:
    """What a format encodes and decodes. Compared by identity: tensors have no one truth value.

    Attributes:
        index: the sample's number.
        id: the row's own id; None when it has none, or when the format has no place for it.
        token_ids: one for each row of the states.
        loss_mask: 0 or 1 for each of them; None when the row had none.
        layer_ids: the order of the second dimension of the states.
        hidden_states: [tokens, layers, hidden_size] on the CPU, in the dtype to save: torch's, or numpy's float32.
        metadata: text that travels with the sample. Encoding adds ``layer_ids``, ``layer_id_convention``, ``index``
            and, where there is an id, ``sample_id``; decoding gives all of it back.
    """

    index: int
    id: str | None
    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...] | None
    layer_ids: tuple[LayerId, ...]
    hidden_states: Tensor = field(repr=False)
    metadata: Mapping[str, str]

    def file_metadata(self) -> dict[str, str]:
        """All text that the file gets, ordered: readers hand it out in any order, and bytes should not depend on it."""
        own = {
            "layer_ids": json.dumps(self.layer_ids),
            "layer_id_convention": LAYER_ID_CONVENTION,
            "index": str(self.index),
        }
        if self.id is not None:
            own["sample_id"] = self.id
        return dict(sorted({**self.metadata, **own}.items()))

    def checked(self, path: Path) -> SampleData:
        """Itself, when its parts fit together.

        Raises:
            SampleFileError: they do not.
        """
        shape = tuple(self.hidden_states.shape)
        if len(shape) != 3 or shape[:2] != (len(self.token_ids), len(self.layer_ids)):
            raise SampleFileError(
                f"{path}: the states have the shape {shape}, its {len(self.token_ids)} tokens and "
                f"{len(self.layer_ids)} layer ids want ({len(self.token_ids)}, {len(self.layer_ids)}, hidden_size)"
            )
        if self.loss_mask is not None and len(self.loss_mask) != len(self.token_ids):
            raise SampleFileError(f"{path}: {len(self.loss_mask)} entries of loss_mask, {len(self.token_ids)} tokens")
        return self


@dataclass(frozen=True, slots=True, eq=False)
class SealedRun:
    """A run whose samples are all done, for the sidecars.

    Attributes:
        entries: the samples that are done, ordered by index; read once.
        rows: the input's rows from the first to the last, those of skipped samples too; may be called more than once.
        num_samples: how many rows there are.
        layer_ids: what was captured, in order.
        num_layers: decoder layers of the model; None when not known.
        model: its name or folder.
        config: the settings of the run, for provenance.
    """

    entries: Iterable[Entry]
    rows: Callable[[], Iterator[Row]]
    num_samples: int
    layer_ids: tuple[LayerId, ...]
    num_layers: int | None
    model: str
    config: Mapping[str, Any]


class Format(ABC):
    """One layout on disk. Stateless: one object serves a whole run, and threads may share it.

    Attributes:
        name: as in ``--format``.
        description: one line for the help.
        readers: what reads it.
        takes_rows: whether the sidecars take the input's rows.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    readers: ClassVar[str]
    takes_rows: ClassVar[bool] = False

    def check(self, layer_ids: tuple[LayerId, ...], num_layers: int | None) -> None:  # noqa: B027
        """Refuse, before anything slow starts, what the format's readers would read wrongly; log what may surprise.

        Args:
            layer_ids: what is to be captured, in order.
            num_layers: decoder layers of the model; None when not known, and then less is checked.

        Raises:
            UsageError: with the layer ids to use instead.
        """

    @abstractmethod
    def file(self, index: int, sample_id: str | None) -> PurePosixPath:
        """Where a sample goes, relative to the run's folder; the folder it is in may have to be made."""

    @abstractmethod
    def encode(self, sample: SampleData) -> list[bytes | memoryview]:
        """The whole file, in parts."""

    def encode_copy(self, sample: SampleData, states_of: Path) -> list[bytes | memoryview]:
        """The whole file of a sample whose states were decoded from another's file, with their bytes as they are there.

        Raises:
            SampleFileError: the other file is missing, damaged, or not of this format.
        """
        return self.encode(sample)

    @abstractmethod
    def decode(self, path: Path, entry_index: int) -> SampleData:
        """The sample of a file, with the states bit by bit as they were encoded.

        Args:
            path: the file.
            entry_index: the index of its entry in the journal, which the result gets.

        Raises:
            SampleFileError: the file is missing, damaged, or not of this format.
            UsageError: a library that reading takes is not installed.
        """

    @abstractmethod
    def row(self, path: Path) -> SampleRow:
        """The tokens and the loss mask of a file; its states are not read.

        Raises:
            SampleFileError: the file is missing, damaged, or not of this format.
            UsageError: a library that reading takes is not installed.
        """

    def seal(self, folder: Path, samples: SealedRun) -> tuple[str, ...]:
        """Write the sidecars, each whole or not at all; writing them again is harmless.

        The default writes ``draft_config.json``; a format with sidecars of its own adds to it.

        Returns:
            Their names, relative to the folder.

        Raises:
            VllmCompatError: one cannot be written.
        """
        from vllm_compat.formats.draft import write_draft_config  # it writes files, so it imports ``extract``

        return write_draft_config(folder, samples.layer_ids, samples.num_layers)
