"""Every effect on the disk, and files that are there as a whole or not at all; the safetensors layout.

No other module of the extraction writes, syncs, renames or removes anything but the rehearsal's own folder, so a test
that puts another ``os`` in this one sees every effect, and can make each of them fail.

The layout is public and never changes, and it is written here: the functions of safetensors that serialize raw bytes
take other arguments in other releases, and they leave no say over the file's mode, its sync, or a full disk.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

from vllm_compat.errors import StorageError
from vllm_compat.extract.tensors import Blob

__all__ = [
    "AppendOnly",
    "make_folder",
    "owner_of_temporary",
    "remove",
    "safetensors_parts",
    "storage",
    "sync_file",
    "write_whole",
]

_Part: TypeAlias = bytes | memoryview
_TEMPORARY = re.compile(r"\..+\.tmp-([0-9a-z-]+)-[0-9a-f]{8}")
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def safetensors_parts(blobs: Mapping[str, Blob], metadata: Mapping[str, str]) -> list[_Part]:
    """The parts of a safetensors file: length of the header, header, then each tensor's bytes.

    Args:
        blobs: name -> tensor; those of wider elements first, so that each begins at a multiple of its element's size.
        metadata: text for the header.
    """
    header: dict[str, object] = {"__metadata__": {name: _utf8(text) for name, text in metadata.items()}}
    end = 0
    for name, blob in blobs.items():
        begin, end = end, end + len(blob.data)
        header[name] = {"dtype": blob.dtype, "shape": blob.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, *(blob.data for blob in blobs.values())]


def write_whole(path: Path, parts: Iterable[_Part], *, owner: str = "run") -> int:
    """Write a file that is under its name only when all of it is on disk; returns its size in bytes.

    Until then it has a hidden name in the same folder, without the suffix that readers look for. The mode is the
    umask's.

    Args:
        path: the file; one that is there is replaced.
        parts: its bytes, in order.
        owner: who may sweep the temporary file away once its writer is dead; digits, lower-case letters and dashes.

    Raises:
        StorageError: it cannot be written; nothing of it is left.
    """
    temporary = path.with_name(f".{path.stem}.tmp-{owner}-{secrets.token_hex(4)}")
    with storage(path, "written"):
        try:
            size = _write(temporary, parts)
            os.replace(temporary, path)  # noqa: PTH105 - this module's os
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)  # noqa: PTH108
            raise
        _sync_folder(path.parent)
    return size


def owner_of_temporary(name: str) -> str | None:
    """The ``owner`` of an unfinished file of ``write_whole``; None for any other name."""
    found = _TEMPORARY.fullmatch(name)
    return found[1] if found else None


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, each durable before the next.

    Raises:
        StorageError: one cannot be made.
    """
    with storage(folder, "made"):
        missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):  # another process of the run was faster
                os.mkdir(path)  # noqa: PTH102
            _sync_folder(path.parent)


def remove(path: Path) -> None:
    """Remove a file if it is there. Not durable: what comes back after a crash is removed again.

    Raises:
        StorageError: it cannot be removed.
    """
    with storage(path, "removed"), contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # noqa: PTH108


def sync_file(path: Path) -> None:
    """Make what was read of a file last: its writer may not have got so far.

    Raises:
        StorageError: it cannot be synced.
    """
    with storage(path, "synced"):
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class AppendOnly:
    """A file that grows by whole records, each durable when ``append`` returns.

    Attributes:
        path: the file; made when missing.
        descriptor: open for reading and writing.
    """

    def __init__(self, path: Path) -> None:
        """Open it; the first ``append`` is valid after ``cut``.

        Raises:
            StorageError: it cannot be opened.
        """
        self.path = path
        self._end = 0
        with storage(path, "opened"):
            self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            try:
                _sync_folder(path.parent)
            except BaseException:
                os.close(self.descriptor)
                raise

    def cut(self, end: int) -> None:
        """Forget everything from ``end`` on, and make the rest durable.

        Raises:
            StorageError: it cannot be done.
        """
        with storage(self.path, "cut"):
            os.ftruncate(self.descriptor, end)
            os.fsync(self.descriptor)
        self._end = end

    def append(self, record: bytes) -> None:
        """Add a record. One that cannot be made durable is taken back as far as the file system lets it.

        Raises:
            StorageError: it is not there, or not known to be.
        """
        with storage(self.path, "written"):
            try:
                _write_all(self.descriptor, record)
                os.fsync(self.descriptor)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.ftruncate(self.descriptor, self._end)
                raise
        self._end += len(record)

    def close(self) -> None:
        """Close the file, which ends a lock on it."""
        os.close(self.descriptor)


@contextlib.contextmanager
def storage(path: Path, what: str) -> Generator[None, None, None]:
    """What the system refuses becomes a ``StorageError`` that says what to do."""
    try:
        yield
    except OSError as error:
        advice = "Make room" if error.errno in _FULL else "See to the file system"
        raise StorageError(
            f"{path} cannot be {what}: {error.strerror or error}. {advice}, and run the same command again: what is "
            "done is kept",
            path=str(path),
            errno=error.errno,
        ) from error


def _write(path: Path, parts: Iterable[_Part]) -> int:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        size = sum(_write_all(descriptor, part) for part in parts)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return size


def _write_all(descriptor: int, part: _Part) -> int:
    left = memoryview(part)
    while left:
        left = left[os.write(descriptor, left) :]
    return len(part)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that syncs no folders
            raise
    finally:
        os.close(descriptor)


def _utf8(text: str) -> str:
    """Text that UTF-8 can hold: the name of a folder need not be."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
