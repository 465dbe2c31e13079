"""The input's rows beside a run's samples, where the input can be had."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_compat.errors import InputError, InputProblem, UsageError
from vllm_compat.extract.inputs import CheckedInput, Sample, TokenizerSource, check_input, read_samples
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


def open_rows(run: RunFacts, given: Path | None, problems: Problems, *, trust_remote_code: bool = False) -> InputRows:
    """The input of a run: the file that is given, or the one that its record names if it still is what it was.

    A given file of other contents is a problem, and compared all the same, so that the rows that differ are named.

    Args:
        run: the run.
        given: its input; None for the file that its record names.
        problems: gets what is wrong.
        trust_remote_code: let the model's tokenizer bring its own code, where it makes tokens of the rows.

    Raises:
        InputError: the given file cannot be used.
        UsageError: a package that reading takes is not installed, or the tokenizer cannot be loaded.
    """
    path = given or run.prepared_data
    found: Any = run.record.input
    how = {"max_tokens": found["max_tokens"], "vocab_size": found["vocab_size"]}
    checked = run.record.checked_input(path, limit=found["limit"], trust_remote_code=trust_remote_code, **how)
    if checked is None:
        if not path.exists():
            if given:
                raise InputError(str(path), [InputProblem(0, "no such file")])
            return InputRows(path, "it is not there any more; say where it is with --prepared-data")
        try:
            checked = check_input(
                path,
                **how,
                num_samples=found["limit"],
                overlong=found.get("overlong", "truncate"),
                tokenizer=_tokenizer(run, trust_remote_code),
            )
        except InputError:
            if given:
                raise
            return InputRows(path, "it is not what it was; say where the run's own is with --prepared-data")
        except UsageError as error:
            if given:
                raise
            return InputRows(path, f"it cannot be read here: {error}")
    elif why := _why_unreadable(checked):
        if given:
            raise UsageError(why)
        return InputRows(path, f"it cannot be read here: {why}")
    if (checked.xxh3, checked.num_samples) != (found["xxh3"], run.num_samples):
        if not given:
            what = "it, or the model's tokenizer," if checked.tokenizer else "it"
            return InputRows(path, f"{what} was changed after the run; say where the run's own is with --prepared-data")
        what = (
            f"the input {path} is not the run's: xxh3 {checked.xxh3} of {checked.num_samples} samples, the run's was "
            f"{found['xxh3']} of {run.num_samples}"
        )
        problems.add(Problem(what))
    return InputRows(path, "", checked)


def _why_unreadable(checked: CheckedInput) -> str:
    """What is missing to read the first row; empty when nothing is."""
    try:
        with contextlib.closing(read_samples(checked)) as samples:
            next(samples)
    except UsageError as error:
        return str(error)
    return ""


def _tokenizer(run: RunFacts, trust_remote_code: bool) -> TokenizerSource | None:
    """What made tokens of the run's rows, whatever it has become since; None where they had them."""
    told: Any = run.record.input.get("tokenizer")
    if not told:
        return None
    options = {"tokenizer": told.get("name"), "tokenizer_revision": told.get("revision")}
    return TokenizerSource.of_engine(run.model, options, trust_remote_code=trust_remote_code, date=told.get("date"))
