"""A statement of a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = ["Plain", "Statement"]

Plain: TypeAlias = "bool | int | str | None | Sequence[int | str]"


@dataclass(frozen=True, slots=True)
class Statement:
    """What is said, and where it comes from.

    Attributes:
        name: its key in a section of the report.
        value: for programs. False speaks against what the section is about; None: not told.
        text: for people.
        evidence: a file below the vLLM package, with its line; or another file, a variable, a table of ours.
    """

    name: str
    value: Plain
    text: str
    evidence: str

    def as_dict(self) -> dict[str, Any]:
        """In plain types, for JSON."""
        return {"value": self.value, "text": self.text, "evidence": self.evidence}
