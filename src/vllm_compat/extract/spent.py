"""Where the time of an extraction went."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Spent"]


@dataclass(slots=True)
class Spent:
    """Seconds that the engine's thread spent.

    Attributes:
        steps: in the engine's steps, with what else is done beside the device's work.
        states: waiting for states on their way to the host, when no step was left to wait beside.
        writers: handing samples to the writers, nearly all of it waiting for room among what they have to write.
        last_files: waiting for the last files.
    """

    steps: float = 0.0
    states: float = 0.0
    writers: float = 0.0
    last_files: float = 0.0
    _counted: float = field(default=0.0, init=False, repr=False)

    @contextlib.contextmanager
    def on(self, what: Literal["steps", "states", "writers", "last_files"]) -> Generator[None, None, None]:
        """Count the time of the block, but for what is counted inside it."""
        start, before = time.monotonic(), self._counted
        try:
            yield
        finally:
            took = time.monotonic() - start
            inside = self._counted - before
            setattr(self, what, getattr(self, what) + took - inside)
            self._counted = before + took

    def told(self, seconds: float) -> str:
        """All of it as a sentence's end, and the rest of ``seconds``: rows read before the first step, files named."""
        rest = max(seconds - self.steps - self.states - self.writers - self.last_files, 0.0)
        return (
            f"{self.steps:.1f} s in steps, {self.states:.1f} s waiting for states, {self.writers:.1f} s for writers "
            f"(--writers, --max-pending-gb), {self.last_files:.1f} s for the last files, {rest:.1f} s between steps"
        )
