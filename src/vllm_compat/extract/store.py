"""One sample becomes a file that lasts, and then a line of the journal: only then is it done."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

from vllm_compat.errors import CaptureError
from vllm_compat.extract.checksum import xxh3
from vllm_compat.extract.done import Done
from vllm_compat.extract.files import make_folder, remove, write_whole
from vllm_compat.extract.journal import Entry, Journal
from vllm_compat.extract.sweep import owner_of
from vllm_compat.formats import Format, SampleData

__all__ = ["Store"]


class Store:
    """Where a shard's samples go. Threads may share it."""

    def __init__(self, folder: Path, form: Format, journal: Journal, shard: tuple[int, int], done: Done) -> None:
        self._folder = folder
        self._form = form
        self._journal = journal
        self._owner = owner_of(shard)
        self._done = done
        self._again = done.again
        self._lock = threading.Lock()
        self._folders: set[Path] = set()
        self._refuses = False

    def commit(self, sample: SampleData, sampled: int | None, states_of: Path | None = None) -> Entry | None:
        """Make a sample durable; None after ``refuse``.

        Args:
            sample: checked, see ``SampleWriter``.
            sampled: the token that vLLM sampled after the prompt.
            states_of: the file of another sample that these states were decoded from; None where they are new.

        Raises:
            CaptureError: the sample is done already.
            StorageError: the file system refused; the sample is not done.
        """
        if self._refuses:
            return None
        parts = self._form.encode(sample) if states_of is None else self._form.encode_copy(sample, states_of)
        path = self._path(sample.index, sample.id)
        size = write_whole(path, parts, owner=self._owner)
        entry = Entry(
            index=sample.index,
            file=path.relative_to(self._folder).as_posix(),
            bytes=size,
            xxh3=xxh3(parts),
            tokens=len(sample.token_ids),
            sampled=sampled,
            id=sample.id,
        )
        return self._record(entry)

    def skip(self, entry: Entry) -> Entry | None:
        """Make it durable that a sample has no file, and why; None after ``refuse``.

        Raises:
            CaptureError: the sample is done already.
            StorageError: the file system refused; the sample is not done.
        """
        if self._refuses:
            return None
        remove(self._path(entry.index, entry.id))  # of a process that was killed before it could write its line
        return self._record(entry)

    def refuse(self) -> None:
        """Let nothing more be committed: something is wrong that more samples would only spread."""
        with self._lock:
            self._refuses = True

    def _record(self, entry: Entry) -> Entry | None:
        with self._lock:
            if self._refuses:
                return None
            if not self._done.owes(entry.index):
                raise CaptureError(f"sample {entry.index} came a second time; nothing of this run is trustworthy")
            if self._done.is_hole(entry.index):
                entry = dataclasses.replace(entry, again=self._again)
            self._journal.append(entry)
            self._done.add(entry, entry.bytes)
            return entry

    def _path(self, index: int, sample_id: str | None) -> Path:
        path = self._folder / self._form.file(index, sample_id)
        if path.parent not in self._folders:
            make_folder(path.parent)
            self._folders.add(path.parent)
        return path
