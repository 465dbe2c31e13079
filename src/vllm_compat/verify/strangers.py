"""Files in a run's folder that are none of the run's: others' samples, and what a dead process left."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from vllm_compat.extract.files import owner_of_temporary, storage
from vllm_compat.extract.names import Names
from vllm_compat.verify.lines import Lines
from vllm_compat.verify.problems import Problem, Problems
from vllm_compat.verify.run import RunFacts

__all__ = ["find_strangers"]

_NUMBER = re.compile(r"\d+")


def find_strangers(run: RunFacts, lines: Lines, own: Names, problems: Problems) -> int:
    """Name the files that readers would take for samples and that are none, and unfinished ones.

    A run under way may have unfinished files, and one that got its name and no line yet; these are counted alone.

    Returns:
        How many there are of those that the same command sees to.

    Raises:
        StorageError: the folder cannot be read.
    """
    unfinished = 0
    suffix = run.format.file(0, None).suffix
    by_id = run.format.file(0, None) != run.format.file(0, "a")  # such a name does not say whose it is
    for name in _files(run.folder):
        path = PurePosixPath(name)
        left = owner_of_temporary(path.name) is not None or ".dataset.tmp" in path.parts
        if not left and (path.suffix != suffix or name in own):
            continue
        owed = not left and (_is_owed(run, lines, name) or (by_id and not run.complete))
        if not run.complete and (left or owed):
            unfinished += 1
        elif left:
            problems.add(Problem("what a process left that was killed; it can be removed", file=name))
        elif not owed:  # a sample that is missing from a complete run has a problem of its own
            problems.add(Problem("it is none of this run's, and a reader would take it for a sample", file=name))
    return unfinished


def _is_owed(run: RunFacts, lines: Lines, name: str) -> bool:
    """Whether a file has the name of a sample that is still to be done."""
    numbers = [n for n in map(int, _NUMBER.findall(name)) if str(run.format.file(n, None)) == name]
    return any(n < run.num_samples and not lines.has(n) for n in numbers)


def _files(folder: Path) -> Iterator[str]:
    """Every file below a folder, relative to it."""
    folders = [""]
    while folders:
        below = folders.pop()
        path = folder / below
        with storage(path, "read"), os.scandir(path) as found:
            for entry in found:
                name = f"{below}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    folders.append(f"{name}/")
                else:
                    yield name
