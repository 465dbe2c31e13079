"""What a case gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Figures", "NotAvailableError", "Work"]


class NotAvailableError(Exception):
    """This vLLM, or this machine, has not what the case measures; the message says why."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a turn works on.

    Attributes:
        prompts: token ids, to be timed.
        warmup: others, to be run before.
        folder: an empty one, for files; on the disk that the files of an extraction would be on.
    """

    prompts: list[list[int]]
    warmup: list[list[int]]
    folder: Path


@dataclass(frozen=True, slots=True)
class Figures:
    """One turn.

    Attributes:
        tokens: that were timed.
        seconds: for them.
        load_seconds: until the engine was ready, which are not in it.
        facts: what else the case found.
        notes: what was done differently than its authors would, in words.
    """

    tokens: int
    seconds: float
    load_seconds: float
    facts: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
