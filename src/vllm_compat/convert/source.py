"""The run that is converted: what it has, and its samples, each proven to be what was written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm_compat.errors import UsageError
from vllm_compat.extract.checksum import xxh3_of_file
from vllm_compat.extract.done import Done, SealedEntries
from vllm_compat.extract.files import storage
from vllm_compat.extract.inputs import CheckedInput, read_samples
from vllm_compat.extract.journal import Entry
from vllm_compat.extract.record import RUN_FILE, Record, read_record
from vllm_compat.formats import Format, Row, SampleData, SampleFileError, get_format
from vllm_compat.types import LayerId

__all__ = ["Source", "open_source"]


class Source:
    """A run.

    Attributes:
        folder: where it is.
        record: its ``run.json``.
        format: how its samples lie on disk.
        layer_ids: what it has, in order.
        num_samples: how many samples there are, done or not.
        config: the settings that it was made with.
        prepared_data: its input.
        done: what is done of them.
    """

    def __init__(self, folder: Path, record: Record) -> None:
        self.folder = folder
        self.record = record
        self.format: Format = get_format(record.identity["format"])
        self.layer_ids: tuple[LayerId, ...] = tuple(record.identity["layer_ids"])
        self.num_samples: int = record.identity["num_samples"]
        self.config: Mapping[str, Any] = record.about.get("config", {})
        self.prepared_data = str(self.config.get("prepared_data", ""))
        self._entries = SealedEntries(folder, self.num_samples)
        self.done: Done = self._entries.done

    @property
    def has_all_rows(self) -> bool:
        """Whether the row of every sample can be had: from its file, or else from the input."""
        return (self.done.complete and not self.done.num_skipped) or self._input() is not None

    def entries(self) -> Iterator[Entry]:
        """What is done, in order."""
        return (entry for entry in self._entries if not self.done.owes(entry.index))

    def read(self, entry: Entry) -> SampleData:
        """The sample of an entry that has a file.

        Raises:
            SampleFileError: the file is not the one that was written, or not of this sample.
            StorageError: it cannot be read.
        """
        path = self.folder / entry.file
        digest = _digest(path)
        if digest != entry.xxh3:
            raise SampleFileError(
                f"sample {entry.index}: {path} is not what was written: its xxh3 is {digest}, the journal has "
                f"{entry.xxh3}. Remove the file, and the command that made the run makes it again"
            )
        sample = self.format.decode(path, entry.index)
        found = (sample.layer_ids, len(sample.token_ids), sample.id)
        if found != (self.layer_ids, entry.tokens, entry.id):
            raise SampleFileError(
                f"sample {entry.index}: {path} has layers, tokens and id {found}, the run has "
                f"{(self.layer_ids, entry.tokens, entry.id)}"
            )
        return sample

    def rows(self) -> Iterator[Row]:
        """The row of every sample: of its file where there is one, else of the input; see ``has_all_rows``.

        Raises:
            SampleFileError: a file that cannot be read.
            InputChangedError: the input is not the one that was checked.
        """
        files = (entry for entry in self.entries() if entry.file)
        following = next(files, None)
        others = self._rows_without_file()
        for index in range(self.num_samples):
            if following and following.index == index:
                yield self.format.row(self.folder / following.file)
                following = next(files, None)
            else:
                yield next(others)

    def _rows_without_file(self) -> Iterator[Row]:
        have = bytearray(self.num_samples)
        for entry in self.entries():
            have[entry.index] = bool(entry.file)
        checked = self._input()
        if checked is not None:
            yield from read_samples(checked, lambda index: not have[index])

    def _input(self) -> CheckedInput | None:
        """The input, when it is where it was and has not been touched since."""
        found: Any = self.record.input
        return self.record.checked_input(
            Path(self.prepared_data), found.get("max_tokens"), found.get("vocab_size"), found.get("limit")
        )


def open_source(folder: Path, *, partial: bool) -> Source:
    """A run that may be converted.

    Raises:
        UsageError: there is none, or it is not complete and ``partial`` is false.
        JournalError: its record or a journal was changed.
        StorageError: something cannot be read.
    """
    record = read_record(folder)
    if record is None:
        raise UsageError(f"{folder} has no {RUN_FILE}, so it is no run; the folder that was --output-dir is wanted")
    try:
        source = Source(folder, record)
    except (KeyError, TypeError) as error:
        raise UsageError(f"{folder / RUN_FILE} is of another release: {error!r}") from error
    if not (record.complete and source.done.complete) and not partial:
        raise UsageError(
            f"{folder}: {len(source.done)} of {source.num_samples} samples are done"
            f"{'' if record.complete else ', and the run is not sealed'}. Run the command that made it again, which "
            "goes on from there, or convert what is done with --partial"
        )
    return source


def _digest(path: Path) -> str:
    with storage(path, "read"):
        try:
            return xxh3_of_file(path)
        except FileNotFoundError as error:
            raise SampleFileError(f"{path} is gone") from error
