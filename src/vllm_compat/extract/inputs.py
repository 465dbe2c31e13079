"""The input file: one JSON object a line, checked as a whole before anything starts, then read again row by row.

A row has ``input_ids`` (integers, at least one), optionally ``loss_mask`` (0 or 1 for each of them) and ``id`` (text or
an integer, unique in the file). Other keys are ignored, blank lines skipped. Neither pass holds more than one row;
of the ids the check holds 8 bytes each.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO, TypeAlias

from vllm_compat.errors import InputError, InputProblem
from vllm_compat.extract.checksum import new_hash
from vllm_compat.extract.ids import Ids
from vllm_compat.extract.rows import Row, parse_row

__all__ = [
    "MAX_KEPT_PROBLEMS",
    "CheckedInput",
    "InputChangedError",
    "Sample",
    "Stamp",
    "check_input",
    "read_samples",
    "stamp_of",
]

MAX_KEPT_PROBLEMS = 1000
_BOM = b"\xef\xbb\xbf"
Stamp: TypeAlias = tuple[int, int, int]


class InputChangedError(InputError):
    """The input file is no longer the one that was checked. Files written before are whole and their own."""

    def __init__(self, path: str) -> None:
        problem = "the file changed after it was checked; leave it alone while a run reads it, and start again"
        super().__init__(path, [InputProblem(0, problem)])
        self.args = (f"{path}: {problem}",)


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample.

    Attributes:
        index: its number among the samples, from 0; blank lines do not count.
        line: its line in the file, from 1; blank lines count.
        id: the row's own id, as text; None when it has none.
        token_ids: what is left of its tokens, from the start.
        loss_mask: 0 or 1 for each of them; None when the row has none.
        truncated: whether tokens were cut off.
    """

    index: int
    line: int
    id: str | None
    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...] | None
    truncated: bool


@dataclass(frozen=True, slots=True)
class CheckedInput:
    """A file without problems.

    Attributes:
        path: the file.
        stamp: size, mtime and inode when it was checked.
        max_tokens: where samples are cut.
        vocab_size: what token ids were checked against, if anything.
        num_samples: samples to read.
        num_tokens: their tokens after the cut.
        num_truncated: samples that lose tokens by it.
        longest: tokens of the longest sample after the cut.
        highest: the highest token id, before the cut, and the line it is on.
        xxh3: digest of the samples' lines.
    """

    path: Path
    stamp: Stamp
    max_tokens: int
    vocab_size: int | None
    num_samples: int
    num_tokens: int
    num_truncated: int
    longest: int
    highest: tuple[int, int]
    xxh3: str


class _Problems:
    """Every problem is counted, the first ones are kept."""

    def __init__(self) -> None:
        self.count = 0
        self.kept: list[InputProblem] = []

    def add(self, line: int, text: str) -> None:
        self.count += 1
        if len(self.kept) < MAX_KEPT_PROBLEMS:
            self.kept.append(InputProblem(line, text))

    def error(self, path: Path) -> InputError:
        self.kept.sort(key=lambda problem: problem.line)
        if self.count > len(self.kept):
            note = f"{self.count} problems were found, of which the first {len(self.kept)} are kept"
            return InputError(str(path), [InputProblem(0, note), *self.kept])
        return InputError(str(path), self.kept)


def check_input(
    path: Path, *, max_tokens: int, vocab_size: int | None = None, num_samples: int | None = None
) -> CheckedInput:
    """Read the file through and find everything that is wrong with it.

    Args:
        path: the file.
        max_tokens: tokens that are kept of a sample.
        vocab_size: token ids must be below it; None when it is not known.
        num_samples: read the first so many samples at most.

    Raises:
        InputError: with every problem, each with its line.
    """
    problems = _Problems()
    ids = Ids()
    digest = new_hash()
    samples = tokens = truncated = longest = 0
    highest = (-1, 0)
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise InputError(str(path), [InputProblem(0, "not a regular file, and it is to be read twice")])
        with path.open("rb") as file:
            stamp = stamp_of(path)
            for line, raw in islice(_lines(file), num_samples):
                samples += 1
                digest.update(raw)
                digest.update(b"\n")
                row = parse_row(raw, vocab_size)
                if not isinstance(row, Row):
                    for text in row:
                        problems.add(line, text)
                    continue
                if row.id is not None:
                    ids.add(row.id)
                count = len(row.token_ids)
                tokens += min(count, max_tokens)
                truncated += count > max_tokens
                longest = max(longest, min(count, max_tokens))
                highest = max(highest, (max(row.token_ids), line), key=lambda found: found[0])
        if repeated := ids.repeated():
            _name_repeated(path, vocab_size, num_samples, repeated, problems)
        if stamp_of(path) != stamp:
            problems.add(0, "the file changed while it was read")
    except OSError as error:
        raise InputError(str(path), [InputProblem(0, f"cannot be read: {error.strerror or error}")]) from error
    if not samples:
        problems.add(0, "there is no sample in the file")
    if problems.count:
        raise problems.error(path)
    return CheckedInput(
        path, stamp, max_tokens, vocab_size, samples, tokens, truncated, longest, highest, digest.hexdigest()
    )


def read_samples(
    checked: CheckedInput, wanted: Callable[[int], bool] = lambda _: True
) -> Generator[Sample, None, None]:
    """The samples of a checked file, in its order, one held at a time.

    Args:
        checked: the file.
        wanted: whether a sample of that index is to be read; the lines of others are passed by unparsed.

    Raises:
        InputChangedError: the file is not the one that was checked.
    """
    changed = InputChangedError(str(checked.path))
    index = -1
    try:
        with checked.path.open("rb") as file:
            for index, (line, raw) in enumerate(islice(_lines(file), checked.num_samples)):
                if not wanted(index):
                    continue
                row = parse_row(raw, checked.vocab_size)
                if stamp_of(checked.path) != checked.stamp or not isinstance(row, Row):
                    raise changed
                end = checked.max_tokens
                mask = None if row.loss_mask is None else row.loss_mask[:end]
                yield Sample(index, line, row.id, row.token_ids[:end], mask, len(row.token_ids) > end)
    except OSError as error:
        raise changed from error
    if index + 1 != checked.num_samples:
        raise changed


def _name_repeated(
    path: Path, vocab_size: int | None, num_samples: int | None, repeated: set[int], problems: _Problems
) -> None:
    first: dict[str, int] = {}
    with path.open("rb") as file:
        for line, raw in islice(_lines(file), num_samples):
            row = parse_row(raw, vocab_size)
            if isinstance(row, Row) and row.id is not None and hash(row.id) in repeated:
                if row.id in first:
                    problems.add(line, f"the id {row.id!r} is also on line {first[row.id]}")
                else:
                    first[row.id] = line


def stamp_of(path: Path) -> Stamp:
    """Size, mtime in nanoseconds and inode.

    Raises:
        OSError: the file is not there.
    """
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ino


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their number from 1; no BOM, no line end."""
    for number, raw in enumerate(file, start=1):
        text = (raw.removeprefix(_BOM) if number == 1 else raw).strip(b" \t\r\n")
        if text:
            yield number, text
