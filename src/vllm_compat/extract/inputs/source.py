"""Where rows come from: a file of one of the known kinds, told by its first bytes and never by its name."""

from __future__ import annotations

import stat
from abc import ABC, abstractmethod
from collections.abc import Generator
from pathlib import Path
from typing import Any, TypeAlias

__all__ = ["Source", "SourceError", "Stamp", "file_stamp", "open_source", "stamp_of"]

Stamp: TypeAlias = tuple[int, int, int]


class SourceError(Exception):
    """A file that cannot be read as what it is; worded for a person."""


class Source(ABC):
    """Rows, read from the first to the last as often as wanted.

    Attributes:
        path: the file, or the folder.
        has_lines: whether a row is a line of text, which says all of it.
    """

    has_lines = False

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def rows(self) -> Generator[tuple[int, Any], None, None]:
        """Each row with its number from 1, as it lies in the file; little more than one of them is held.

        Raises:
            OSError, SourceError: the file cannot be read.
        """

    @abstractmethod
    def fields(self, raw: Any) -> dict[str, Any] | list[str]:
        """A row in plain types, or what is wrong with it."""

    def stamp(self) -> Stamp:
        """Size, mtime in nanoseconds and inode.

        Raises:
            OSError: the file is not there.
        """
        return file_stamp(self.path)


def file_stamp(path: Path) -> Stamp:
    """The same of any file.

    Raises:
        OSError: it is not there.
    """
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ino


def open_source(path: Path) -> Source:
    """The source of a path.

    Raises:
        OSError, SourceError: it cannot be read, or is of no known kind.
        UsageError: a package that reading takes is not installed.
    """
    from vllm_compat.extract.inputs.arrow import ArrowFile, ArrowFolder
    from vllm_compat.extract.inputs.jsonl import JsonLines
    from vllm_compat.extract.inputs.parquet import ParquetFile

    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        return ArrowFolder(path)
    if not stat.S_ISREG(mode):
        raise SourceError("not a regular file, and it is to be read twice")
    with path.open("rb") as file:
        start = file.read(8)
    if start.startswith(b"PAR1"):
        return ParquetFile(path)
    if start.startswith((b"ARROW1\0\0", b"\xff\xff\xff\xff")):  # the file and the stream of Arrow's own format
        return ArrowFile(path)
    return JsonLines(path)


def stamp_of(path: Path) -> Stamp:
    """Size, mtime in nanoseconds and inode; of a dataset's folder those of all its files, folded into one.

    Raises:
        OSError: it is not there, or cannot be read.
    """
    try:
        return open_source(path).stamp() if path.is_dir() else file_stamp(path)
    except SourceError as error:
        raise OSError(str(error)) from error
