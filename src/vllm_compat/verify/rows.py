"""The input's rows beside a run's samples, where the input can be had."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_compat.errors import InputError, InputProblem
from vllm_compat.extract.inputs import CheckedInput, Sample, check_input, read_samples
from vllm_compat.verify.problems import Problem, Problems
from vllm_compat.verify.run import RunFacts

__all__ = ["InputRows", "open_rows"]


@dataclass(frozen=True, slots=True)
class InputRows:
    """The rows, or why they are not compared.

    Attributes:
        path: the input.
        why_not: why nothing is compared with it; empty when it is.
    """

    path: Path
    why_not: str
    _checked: CheckedInput | None = field(default=None, repr=False)

    def read(self, only: Container[int] | None) -> Iterator[Sample]:
        """The rows in order, cut as they were for their states; none where they are not compared.

        Args:
            only: the samples whose rows are wanted; None for all.

        Raises:
            InputChangedError: the file changes meanwhile.
        """
        if self._checked is None:
            return iter(())
        return read_samples(self._checked, lambda index: only is None or index in only)


def open_rows(run: RunFacts, given: Path | None, problems: Problems) -> InputRows:
    """The input of a run: the file that is given, or the one that its record names if it still is what it was.

    A given file of other contents is a problem, and compared all the same, so that the rows that differ are named.

    Raises:
        InputError: the given file cannot be used.
    """
    path = given or run.prepared_data
    found: Any = run.record.input
    how = {"max_tokens": found["max_tokens"], "vocab_size": found["vocab_size"]}
    checked = run.record.checked_input(path, limit=found["limit"], **how)
    if checked is None:
        if not path.exists():
            if given:
                raise InputError(str(path), [InputProblem(0, "no such file")])
            return InputRows(path, "it is not there any more; say where it is with --prepared-data")
        try:
            checked = check_input(path, **how, num_samples=found["limit"])
        except InputError:
            if given:
                raise
            return InputRows(path, "it is not what it was; say where the run's own is with --prepared-data")
    if (checked.xxh3, checked.num_samples) != (found["xxh3"], run.num_samples):
        if not given:
            return InputRows(path, "it was changed after the run; say where the run's own is with --prepared-data")
        what = (
            f"the input {path} is not the run's: xxh3 {checked.xxh3} of {checked.num_samples} samples, the run's was "
            f"{found['xxh3']} of {run.num_samples}"
        )
        problems.add(Problem(what))
    return InputRows(path, "", checked)
