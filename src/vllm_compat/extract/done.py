"""Which samples are done: those with a good line in a journal and a file of the size that it names."""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path

from vllm_compat.extract.files import storage
from vllm_compat.extract.journal import Entry, Told, entry_at, find_journals, read_journal

__all__ = ["MAX_NAMED", "Done", "SealedEntries", "read_done"]

MAX_NAMED = 1000
_OWED, _HOLE, _DONE, _SKIPPED = range(4)
_NOWHERE = 2**64 - 1


class Done:
    """What is done of a run, in one byte a sample.

    Attributes:
        tokens: tokens of the samples that are done.
        bytes: size of their files.
        again: what the lines of lost files that are made again say; see ``Entry``.
        skipped: index -> why it was skipped, of the first ``MAX_NAMED`` of them.
    """

    def __init__(self, num_samples: int) -> None:
        self.tokens = 0
        self.bytes = 0
        self.again = 1
        self.skipped: dict[int, str] = {}
        self._state = bytearray(num_samples)
        self._again: dict[int, int] = {}

    def __len__(self) -> int:
        """How many samples are done, skipped ones too."""
        return self._state.count(_DONE) + self._state.count(_SKIPPED)

    @property
    def num_files(self) -> int:
        """How many of them have a file."""
        return self._state.count(_DONE)

    @property
    def num_skipped(self) -> int:
        """How many of them were skipped."""
        return self._state.count(_SKIPPED)

    @property
    def complete(self) -> bool:
        """Whether all are done."""
        return len(self) == len(self._state)

    def owes(self, index: int) -> bool:
        """Whether a sample is still to be done."""
        return self._state[index] <= _HOLE

    def is_hole(self, index: int) -> bool:
        """Whether a sample was done once, and its file is gone."""
        return self._state[index] == _HOLE

    def owed(self, shard: tuple[int, int]) -> int:
        """How many samples of a shard are still to be done."""
        mine = self._state[shard[0] :: shard[1]]
        return mine.count(_OWED) + mine.count(_HOLE)

    def first_owed(self, most: int = 10) -> list[int]:
        """The first samples that are still to be done."""
        return [index for index, state in enumerate(self._state) if state <= _HOLE][:most]

    def add(self, entry: Told | Entry, size: int | None) -> bool:
        """Take in one more line of the journals; False when another that counts more was there before.

        Args:
            entry: the line.
            size: its file's size now; None when there is none.
        """
        index, state = entry.index, self._state
        if entry.again or self._again:
            if entry.again < self._again.get(index, 0):
                return False
            if entry.again:
                self._again[index] = entry.again
                self.again = max(self.again, entry.again + 1)
        if state[index] == _DONE:  # the line before was of the same tokens
            self.tokens -= entry.tokens
            self.bytes -= size or 0
        if entry.skipped:
            state[index] = _SKIPPED
            if len(self.skipped) < MAX_NAMED:
                self.skipped[index] = entry.skipped
        elif size == entry.bytes:
            state[index] = _DONE
            self.tokens += entry.tokens
            self.bytes += entry.bytes
        else:
            state[index] = _HOLE
        return True


def read_done(folder: Path, num_samples: int, journals: Iterable[Path] | None = None) -> tuple[Done, dict[Path, int]]:
    """What the journals of a folder say, all shards together; nothing is changed.

    Args:
        folder: of the run.
        num_samples: of the run.
        journals: those that were found there; None to look for them.

    Returns:
        What is done, and where the good part of each journal ends.

    Raises:
        JournalError: a line that is not what was written.
        StorageError: something cannot be read.
    """
    done = Done(num_samples)
    ends: dict[Path, int] = {}
    with _sizes(folder) as size_of:
        for path in [path for path, _ in find_journals(folder)] if journals is None else journals:
            for _, told in _entries(path, num_samples, ends):
                done.add(told, size_of(told.file))
    return done, ends


class SealedEntries:
    """The entries of a run, one for each sample, in order; 8 bytes of memory a sample, and read from the journals.

    Attributes:
        done: what is done.
        journals: where the entries are.
    """

    def __init__(self, folder: Path, num_samples: int) -> None:
        """Find the line that counts for each sample.

        Raises:
            JournalError: a line that is not what was written.
            StorageError: something cannot be read.
        """
        self.done = Done(num_samples)
        self.journals = [path for path, _ in find_journals(folder)]
        self._places = array("Q", [_NOWHERE]) * num_samples
        with _sizes(folder) as size_of:
            for number, path in enumerate(self.journals):
                for offset, told in _entries(path, num_samples, {}):
                    if self.done.add(told, size_of(told.file)):
                        self._places[told.index] = offset * len(self.journals) + number

    def __iter__(self) -> Iterator[Entry]:
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(path.open("rb")) for path in self.journals]
            for place in self._places:
                if place != _NOWHERE:
                    offset, number = divmod(place, len(files))
                    yield entry_at(files[number], offset)


def _entries(path: Path, num_samples: int, ends: dict[Path, int]) -> Generator[tuple[int, Told], None, None]:
    ends[path] = yield from read_journal(path, num_samples)


@contextlib.contextmanager
def _sizes(folder: Path) -> Generator[Callable[[str], int | None], None, None]:
    """What tells the size of a file below a folder; None for one that is not there."""
    stat = os.stat
    with storage(folder, "read"):
        root = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)  # a whole path would be looked up a million times

    def size_of(file: str) -> int | None:
        try:
            return stat(file, dir_fd=root).st_size
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            with storage(folder / file, "read"):
                raise error

    try:
        yield size_of
    finally:
        os.close(root)
