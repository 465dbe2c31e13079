"""What is wrong with a run: every problem is counted and told, the first ones are kept."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_compat.extract.files import storage

__all__ = ["SHOWN", "JsonReport", "Problem", "Problems"]

SHOWN = 20


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        what: in words.
        index: the sample; None for one of the run as a whole.
        file: relative to the run's folder; empty when it is about none.
        line: of the input, or of the journal that ``file`` names; 0 when not known.
    """

    what: str
    index: int | None = None
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        where = [] if self.index is None else [f"sample {self.index}"]
        if self.line:
            where.append(f"line {self.line}" if self.index is None else f"line {self.line} of the input")
        if self.file:
            where.insert(0 if self.index is None else len(where), self.file)
        return f"{', '.join(where)}: {self.what}" if where else self.what


class JsonReport:
    """A JSON object that is written while the problems are found, so that a million of them take no memory."""

    def __init__(self, path: Path) -> None:
        """Begin the file.

        Raises:
            StorageError: it cannot be written.
        """
        self._path = path
        self._separator = "\n"
        with storage(path, "written"):
            self._file = path.open("w", encoding="utf-8")
            self._file.write('{"problems": [')

    def add(self, problem: Problem) -> None:
        """Write one problem.

        Raises:
            StorageError: it cannot be written.
        """
        with storage(self._path, "written"):
            self._file.write(self._separator + json.dumps(asdict(problem)))
        self._separator = ",\n"

    def close(self, rest: Mapping[str, Any]) -> None:
        """Write the other keys, and end the file.

        Raises:
            StorageError: it cannot be written.
        """
        with storage(self._path, "written"), self._file:
            self._file.write("\n],\n" + json.dumps(rest, default=str)[1:] + "\n")


class Problems:
    """The problems of one verification.

    Attributes:
        count: how many there are.
    """

    def __init__(self, num_samples: int, report: JsonReport | None = None) -> None:
        self.count = 0
        self._of_run: list[Problem] = []
        self._of_samples: list[Problem] = []
        self._bad = bytearray(num_samples)
        self._report = report

    @property
    def num_samples(self) -> int:
        """How many samples have one."""
        return self._bad.count(1)

    @property
    def first(self) -> tuple[Problem, ...]:
        """Those to show: the first of the run as a whole, then the first of samples."""
        return (*self._of_run, *self._of_samples)[:SHOWN]

    def add(self, problem: Problem) -> None:
        """One more.

        Raises:
            StorageError: the report cannot be written.
        """
        self.count += 1
        if problem.index is not None:
            self._bad[problem.index] = 1
        kept = self._of_run if problem.index is None else self._of_samples
        if len(kept) < SHOWN:
            kept.append(problem)
        if self._report:
            self._report.add(problem)
