"""Everything that is wrong with an input."""

from __future__ import annotations

from pathlib import Path

from vllm_compat.errors import InputError, InputProblem

__all__ = ["MAX_KEPT_PROBLEMS", "InputProblems"]

MAX_KEPT_PROBLEMS = 1000


class InputProblems:
    """Every problem is counted, the first ones are kept."""

    def __init__(self) -> None:
        self.count = 0
        self.kept: list[InputProblem] = []

    def add(self, line: int, text: str) -> None:
        """One more."""
        self.count += 1
        if len(self.kept) < MAX_KEPT_PROBLEMS:
            self.kept.append(InputProblem(line, text))

    def error(self, path: Path) -> InputError:
        """What is raised for them."""
        self.kept.sort(key=lambda problem: problem.line)
        if self.count > len(self.kept):
            note = f"{self.count} problems were found, of which the first {len(self.kept)} are kept"
            return InputError(str(path), [InputProblem(0, note), *self.kept])
        return InputError(str(path), self.kept)
