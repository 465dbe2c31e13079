"""What a dead process left in a run's folder, and what is not of the run."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

from vllm_compat.extract.done import Done
from vllm_compat.extract.files import owner_of_temporary, remove, storage
from vllm_compat.extract.journal import journal_name
from vllm_compat.extract.locks import is_locked
from vllm_compat.formats import Format

__all__ = ["find_strangers", "owner_of", "sweep"]

_NUMBER = re.compile(r"\d+")

logger = logging.getLogger(__name__)


def owner_of(shard: tuple[int, int]) -> str:
    """The name under which a shard's unfinished files are its own."""
    return "{}-of-{}".format(*shard)


def sweep(folder: Path, shard: tuple[int, int]) -> None:
    """Remove the unfinished files of processes that are dead; to be called with the locks of folder and shard.

    Raises:
        StorageError: one cannot be removed, or the folder not be read.
    """
    removed = 0
    for path in _files(folder):
        owner = owner_of_temporary(os.path.basename(path))  # noqa: PTH119 - a million times
        if owner is not None and (owner in ("run", owner_of(shard)) or not _alive(folder, owner)):
            remove(Path(path))
            removed += 1
    if removed:
        logger.info("%d unfinished files of a process that was killed are removed", removed)


def find_strangers(folder: Path, form: Format, done: Done | None = None, num_samples: int = 0) -> Iterator[str]:
    """Files that are named like samples of a format, and are none that is done; relative to the folder.

    Raises:
        StorageError: the folder cannot be read.
    """
    for path in _files(folder):
        name = path[len(str(folder)) + 1 :]
        index = _index(form, name)
        if index is not None and (done is None or index >= num_samples or done.owes(index) or index in done.skipped):
            yield name


def _index(form: Format, name: str) -> int | None:
    """Which sample's file has that name; formats number their files."""
    return next((i for i in map(int, _NUMBER.findall(name)) if str(form.file(i, None)) == name), None)


def _alive(folder: Path, owner: str) -> bool:
    index, _, count = owner.partition("-of-")
    if not (index.isdecimal() and count.isdecimal()):
        return False
    journal = folder / journal_name((int(index), int(count)))
    return journal.exists() and is_locked(journal)


def _files(folder: Path) -> Iterator[str]:
    """Every file below a folder, none of the names held for longer than its turn."""
    folders = [str(folder)]
    while folders:
        path = folders.pop()
        with storage(Path(path), "read"), os.scandir(path) as found:
            for entry in found:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    yield entry.path
