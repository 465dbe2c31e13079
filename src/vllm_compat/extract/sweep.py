"""What a dead process left in a run's folder, and what is not of the run."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from vllm_compat.extract.done import SealedEntries
from vllm_compat.extract.files import owner_of_temporary, remove, storage
from vllm_compat.extract.journal import journal_name
from vllm_compat.extract.locks import is_locked
from vllm_compat.extract.names import Names
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
    for file in _files(folder):
        owner = owner_of_temporary(file.name)
        if owner is not None and (owner in ("run", owner_of(shard)) or not _alive(folder, owner)):
            remove(Path(file.path))
            removed += 1
    if removed:
        logger.info("%d unfinished files of a process that was killed are removed", removed)


def find_strangers(folder: Path, form: Format, run: SealedEntries | None = None) -> Iterator[str]:
    """Files that are named like samples of a format, and are none of a run's; relative to the folder.

    Args:
        folder: where to look.
        form: the format.
        run: the run that the folder has, each of its files known to be there; None for none.

    Raises:
        JournalError: a journal was changed meanwhile.
        StorageError: the folder cannot be read.
    """
    suffix = form.file(0, None).suffix
    if run and run.done.num_files == sum(file.name.endswith(suffix) for file in _files(folder)):
        return  # as many as the run has, so they are its own
    own = Names()
    for entry in run or ():
        own.add(entry.file)
    own.end()
    for file in _files(folder):
        name = file.path[len(str(folder)) + 1 :]
        if name.endswith(suffix) and _is_sample(form, name) and name not in own:
            yield name


def _is_sample(form: Format, name: str) -> bool:
    """Whether the file of some sample may have that name: formats name them by their numbers, or by ids."""
    by_id = form.file(0, PurePosixPath(name).stem)
    return str(by_id) == name or any(str(form.file(n, None)) == name for n in map(int, _NUMBER.findall(name)))


def _alive(folder: Path, owner: str) -> bool:
    index, _, count = owner.partition("-of-")
    if not (index.isdecimal() and count.isdecimal()):
        return False
    journal = folder / journal_name((int(index), int(count)))
    return journal.exists() and is_locked(journal)


def _files(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Every file below a folder, none held for longer than its turn, and none of a hidden folder, as a rehearsal's."""
    folders = [str(folder)]
    while folders:
        path = folders.pop()
        with storage(Path(path), "read"), os.scandir(path) as found:
            for entry in found:
                if not entry.is_dir(follow_symlinks=False):
                    yield entry
                elif not entry.name.startswith("."):
                    folders.append(entry.path)
