"""Locks between the processes of a run: one a shard, and one at a time where all share a file.

``flock`` ends with its process, however that ends. A file system without locks gets a warning, and care is the user's.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
from collections.abc import Generator
from pathlib import Path

from vllm_compat.errors import UsageError
from vllm_compat.extract.files import storage

__all__ = ["LOCK_FILE", "ShardBusyError", "is_locked", "lock", "locked_folder", "unlock"]

LOCK_FILE = ".lock"
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})
_BUSY = frozenset({errno.EAGAIN, errno.EACCES})

logger = logging.getLogger(__name__)


class ShardBusyError(UsageError):
    """Another process is at work where this one wanted to be; it may be one that is about to end."""


class _Held:
    """Descriptors that hold a lock. A forked worker must not hold it on when this process is gone."""

    def __init__(self) -> None:
        self._descriptors: set[int] = set()
        self._registered = False

    def add(self, descriptor: int) -> None:
        if not self._registered:
            os.register_at_fork(after_in_child=self._close)
            self._registered = True
        self._descriptors.add(descriptor)

    def discard(self, descriptor: int) -> None:
        self._descriptors.discard(descriptor)

    def _close(self) -> None:
        for descriptor in self._descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._descriptors.clear()


_held = _Held()


def lock(descriptor: int, path: Path, *, wait: bool = False) -> bool:
    """Take the lock of an open file; False when another process has it. ``unlock`` before the file is closed.

    Raises:
        StorageError: anything but that.
    """
    with storage(path, "locked"):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            if error.errno in _BUSY:
                return False
            if error.errno not in _NO_LOCKS:
                raise
            logger.warning("%s: this file system has no locks; let no other process extract the same shard", path)
    _held.add(descriptor)
    return True


def unlock(descriptor: int) -> None:
    """End the lock."""
    _held.discard(descriptor)
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def is_locked(path: Path) -> bool:
    """Whether another process, or this one, has the lock of a file.

    Raises:
        StorageError: the file cannot be opened.
    """
    with storage(path, "opened"):
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # NFS locks nothing that is open for reading alone
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _BUSY
    finally:
        os.close(descriptor)
    return False


@contextlib.contextmanager
def locked_folder(folder: Path) -> Generator[None, None, None]:
    """One process at a time for what all of a run share.

    Raises:
        StorageError: the lock file cannot be made.
    """
    path = folder / LOCK_FILE
    with storage(path, "opened"):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        lock(descriptor, path, wait=True)
        yield
    finally:
        unlock(descriptor)
        os.close(descriptor)
