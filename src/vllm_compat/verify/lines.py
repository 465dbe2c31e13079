"""The journals' lines, read past what is wrong with them: 8 bytes of memory a sample."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

from vllm_compat.errors import JournalError
from vllm_compat.extract.files import storage
from vllm_compat.extract.journal import Entry, Told, entry_at, find_journals, parse_journal
from vllm_compat.verify.problems import Problem, Problems
from vllm_compat.verify.run import RunFacts

__all__ = ["Lines"]

_NOWHERE = 2**64 - 1
_NOT_WRITTEN = "it is not what was written: its checksum is wrong"


class Lines:
    """For each sample the line that counts.

    Attributes:
        num_done: samples that have a line.
        torn: journals of a run under way that end in half a line, as a crash leaves them.
    """

    def __init__(self, run: RunFacts, problems: Problems) -> None:
        """Read all journals; lines that are bad, of another run or of a sample that has one are problems.

        Raises:
            StorageError: a journal cannot be read.
        """
        self.num_done = 0
        self.torn: list[str] = []
        self._paths = [path for path, _ in find_journals(run.folder)]
        self._places = array("Q", [_NOWHERE]) * run.num_samples
        self._again: dict[int, int] = {}
        for number, path in enumerate(self._paths):
            self._read(number, path, run, problems)

    def __iter__(self) -> Iterator[tuple[int, Entry | None]]:
        """Every sample's index, and its entry where it has one.

        Raises:
            JournalError: a journal was changed since.
            StorageError: it cannot be read.
        """
        return self._entries(range(len(self._places)))

    def entries(self, indices: Iterable[int]) -> Iterator[tuple[int, Entry]]:
        """The same for some samples, those without an entry left out."""
        return ((index, entry) for index, entry in self._entries(indices) if entry)

    def has(self, index: int) -> bool:
        """Whether a sample has a line."""
        return index < len(self._places) and self._places[index] != _NOWHERE

    def _entries(self, indices: Iterable[int]) -> Iterator[tuple[int, Entry | None]]:
        with contextlib.ExitStack() as stack:
            files = []
            for path in self._paths:
                with storage(path, "read"):
                    files.append(stack.enter_context(path.open("rb")))
            for index in indices:
                place = self._places[index]
                offset, number = divmod(place, max(len(files), 1))
                yield index, None if place == _NOWHERE else entry_at(files[number], offset)

    def _read(self, number: int, path: Path, run: RunFacts, problems: Problems) -> None:
        offset = 0
        bad: tuple[int, str] | None = None
        with storage(path, "read"), path.open("rb", buffering=1 << 20) as file:
            for line_number, line in enumerate(file, start=1):
                if bad:
                    problems.add(Problem(bad[1], file=path.name, line=bad[0]))
                told = _told(line, path, run.num_samples)
                bad = (line_number, told) if isinstance(told, str) else None
                if isinstance(told, Told) and not self._add(told, offset * len(self._paths) + number):
                    what = f"the journals have it twice; the later line is {line_number} of {path.name}"
                    problems.add(Problem(what, told.index, told.file))
                offset += len(line)
        if bad and (run.complete or bad[1] != _NOT_WRITTEN):
            problems.add(Problem(bad[1], file=path.name, line=bad[0]))
        elif bad:
            self.torn.append(path.name)

    def _add(self, told: Told, place: int) -> bool:
        """Take in a line; False when the sample has one of the same count."""
        first = self._places[told.index] == _NOWHERE
        before = self._again.get(told.index, 0)
        if first or told.again >= before:
            self._places[told.index] = place
            if told.again:
                self._again[told.index] = told.again
        self.num_done += first
        return first or told.again != before


def _told(line: bytes, path: Path, num_samples: int) -> Told | str:
    """What a line says, or what is wrong with it."""
    try:
        for _, told in parse_journal([line], path, num_samples):
            return told
    except JournalError:
        return f"it names a sample of another run: there are {num_samples} here, from 0"
    return _NOT_WRITTEN
