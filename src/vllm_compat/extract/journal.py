"""The journal of one shard: a line for each sample that is done, and nothing else counts as done.

A line is the CRC-32 of the rest, in 8 hexadecimal digits, a blank, and compact JSON. Lines are only ever appended, each
synced before the next, so a crash can tear the last one alone: a torn tail is cut when its shard goes on, and read past
until then. A bad line that has another after it was changed later, and is refused with its number.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Generator, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from vllm_compat.errors import JournalError
from vllm_compat.extract.files import AppendOnly, storage
from vllm_compat.extract.locks import ShardBusyError, is_locked, lock, unlock

__all__ = [
    "Entry",
    "Journal",
    "Told",
    "encode_entry",
    "entry_at",
    "find_journals",
    "has_begun",
    "journal_name",
    "parse_journal",
    "read_journal",
]

_NAME = re.compile(r"journal-(\d+)-of-(\d+)\.jsonl")
_BLOCK = 1 << 16
_AROUND = len("01234567 \n")
_FILE = r"[A-Za-z0-9_][A-Za-z0-9._-]*(?:/[A-Za-z0-9_-][A-Za-z0-9._-]*)*"  # below the folder, no part of it hidden
_NO_FILE: dict[str, Any] = {"file": "", "bytes": 0, "xxh3": ""}
# Nearly every line; the others, which have more to say, go through the JSON parser at a fraction of the speed.
_PLAIN = (
    rf'([0-9a-f]{{8}}) (\{{"index":(\d{{1,18}}),"file":"({_FILE})","bytes":(\d{{1,18}}),"xxh3":"([0-9a-f]{{16}})",'
    r'"tokens":(\d{1,18}),"sampled":(\d{1,18})(?:,"id":"([ !#-\[\]-~]*)")?\})\n'
)
_PLAIN_LINE = re.compile(_PLAIN.encode())
_LINES = re.compile(rf"{_PLAIN}|([^\n]*\n|[^\n]+)".encode())  # the last group: any other line


@dataclass(slots=True)  # not frozen, as a million are made at a start, which would take longer
class Told:
    """What a line says, as far as it takes to know what is done; for the fields see ``Entry``."""

    index: int
    file: str
    bytes: int
    tokens: int
    again: int = 0
    skipped: str = ""


@dataclass(slots=True)
class Entry:
    """One sample that is done.

    Attributes:
        index: its number among the samples.
        file: its file, relative to the run's folder; empty when it was skipped.
        bytes: the file's size.
        xxh3: the file's digest, 16 hexadecimal digits; empty when it was skipped.
        tokens: the sample's tokens.
        sampled: the token that vLLM itself sampled after the prompt; None when it sampled none.
        id: the row's own id.
        again: 0, or more for a sample whose earlier file was lost: of two lines for a sample the higher one counts.
        skipped: why there is no file; empty when there is one.
    """

    index: int
    file: str
    bytes: int
    xxh3: str
    tokens: int
    sampled: int | None
    id: str | None = None
    again: int = 0
    skipped: str = ""


def encode_entry(entry: Entry) -> bytes:
    """The line of an entry."""
    nothing = {"id": None, "again": 0, "skipped": ""} | (_NO_FILE if entry.skipped else {})
    fields = {name: value for name, value in asdict(entry).items() if name not in nothing or value != nothing[name]}
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def parse_journal(blocks: Iterable[bytes], path: Path, num_samples: int) -> Generator[tuple[int, Told], None, int]:
    """What a journal's lines say, each with its offset; returns where the good part ends.

    Args:
        blocks: the file from its start, one or more lines in each; only the last may have no line end.
        path: the file, for the message.
        num_samples: indices lie below it.

    Raises:
        JournalError: a bad line that is not the last.
    """
    number = end = bad = 0
    for block in blocks:
        for crc, text, index, file, size, _, tokens, _, _, other in _LINES.findall(block):
            if bad:
                raise _changed(path, bad)
            number += 1
            if not other and zlib.crc32(text) == int(crc, 16):
                told, length = Told(int(index), file.decode(), int(size), int(tokens)), len(text) + _AROUND
            elif entry := _parse_line(other):
                told = Told(entry.index, entry.file, entry.bytes, entry.tokens, entry.again, entry.skipped)
                length = len(other)
            else:
                bad = number
                continue
            if told.index >= num_samples:
                raise JournalError(
                    f"{path}: line {number} names sample {told.index} of a run of {num_samples}; it is of another run",
                    path=str(path),
                    line=number,
                )
            yield end, told
            end += length
    return end


def read_journal(path: Path, num_samples: int) -> Generator[tuple[int, Told], None, int]:
    """``parse_journal`` of a file.

    Raises:
        JournalError: a bad line that is not the last.
        StorageError: the file cannot be read.
    """
    with storage(path, "read"), path.open("rb") as file:
        return (yield from parse_journal(iter(lambda: file.read(_BLOCK) + file.readline(), b""), path, num_samples))


def journal_name(shard: tuple[int, int]) -> str:
    """The file name of a shard's journal."""
    return "journal-{}-of-{}.jsonl".format(*shard)


def find_journals(folder: Path) -> list[tuple[Path, tuple[int, int]]]:
    """The journals of a folder, in the order of their shards.

    Raises:
        StorageError: the folder cannot be read.
    """
    with storage(folder, "read"), os.scandir(folder) as entries:  # a glob would hold a million names
        names = [name for entry in entries if (name := entry.name).startswith("journal-")]
    found = [(name, (int(m[1]), int(m[2]))) for name in names if (m := _NAME.fullmatch(name))]
    return sorted(((folder / name, shard) for name, shard in found), key=lambda item: item[1][::-1])


def has_begun(folder: Path) -> bool:
    """Whether a run of this folder has done anything, or is at work: what has not may be another run.

    Raises:
        StorageError: the folder or a journal cannot be read.
    """

    return any(path.stat().st_size or is_locked(path) for path, _ in find_journals(folder))


class Journal:
    """The journal that this process adds to, locked for as long as it is open."""

    def __init__(self, folder: Path, shard: tuple[int, int]) -> None:
        """Open it, made when missing.

        Raises:
            ShardBusyError: another process has it.
            StorageError: it cannot be opened.
        """
        self.path = folder / journal_name(shard)
        self._file = AppendOnly(self.path)
        try:
            locked = lock(self._file.descriptor, self.path)
        except BaseException:
            self._file.close()
            raise
        if not locked:
            self._file.close()
            raise ShardBusyError(
                f"another process extracts shard {shard[0]}/{shard[1]} into {folder}. Wait for it, or give every "
                "process a shard of its own (--shard)"
            )

    def recover(self, end: int) -> None:
        """Cut the torn tail after ``end``, and make the rest durable; to be called before the first ``append``.

        Raises:
            StorageError: it cannot be done.
        """
        self._file.cut(end)

    def append(self, entry: Entry) -> None:
        """Make an entry durable; not for two threads at once.

        Raises:
            JournalError: it would not be read back as what it is, as with a file outside the folder.
            StorageError: it is not there, or not known to be.
        """
        line = encode_entry(entry)
        if _parse_line(line) != entry:
            raise JournalError(f"{entry} cannot be told in a journal", path=str(self.path))
        self._file.append(line)

    def close(self) -> None:
        """End the lock."""
        unlock(self._file.descriptor)
        self._file.close()


def entry_at(file: BinaryIO, offset: int) -> Entry:
    """The entry whose line begins at an offset of an open journal.

    Raises:
        JournalError: there is none any more.
    """
    file.seek(offset)
    entry = _parse_line(file.readline())
    if entry is None:
        raise JournalError(f"{file.name} was changed while it was read", path=file.name)
    return entry


def _changed(path: Path, line: int) -> JournalError:
    return JournalError(
        f"{path}: line {line} is not what was written: its checksum is wrong, or it is of another release. A crash can "
        "tear only the last line, so the file was changed, or the disk fails. Nothing was started. What the line named "
        "is not trusted; remove the line, and the same command extracts its sample again",
        path=str(path),
        line=line,
    )


def _parse_line(line: bytes) -> Entry | None:
    if found := _PLAIN_LINE.fullmatch(line):
        crc, text, index, file, size, digest, tokens, sampled, name = found.groups()
        if zlib.crc32(text) != int(crc, 16):
            return None
        row_id = None if name is None else name.decode()
        return Entry(int(index), file.decode(), int(size), digest.decode(), int(tokens), int(sampled), row_id)
    crc, blank, text = line[:8], line[8:9], line[9:-1]
    if blank != b" " or line[-1:] != b"\n" or crc != b"%08x" % zlib.crc32(text):
        return None
    try:
        return _checked(json.loads(text))
    except (ValueError, RecursionError):
        return None


def _checked(found: Any) -> Entry | None:
    """An entry of a line whose checksum is right; None when another program wrote it."""
    if not isinstance(found, dict):
        return None
    fields = cast("dict[str, Any]", found)
    skipped = fields.get("skipped")
    try:
        entry = Entry(**(_NO_FILE if skipped else {}), **fields)
    except TypeError:
        return None
    numbers: Sequence[Any] = (entry.index, entry.bytes, entry.tokens, entry.again)
    texts: Sequence[Any] = (entry.file, entry.xxh3, entry.skipped)
    if (
        any(type(n) is not int or n < 0 for n in numbers)
        or any(type(text) is not str for text in texts)
        or (entry.sampled is not None and type(entry.sampled) is not int)
        or (entry.id is not None and type(entry.id) is not str)
        or not (skipped or re.fullmatch(_FILE, entry.file))
    ):
        return None
    return entry
