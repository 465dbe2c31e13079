"""On a CPU vLLM binds the thread that opens an engine in this process to a core of its own, for good.

Whatever that thread starts afterwards, writers of files among them, would inherit the bond and take turns on that core
with the model, beside cores that have nothing to do. So the bond holds during steps and no longer.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator
from typing import TypeVar

__all__ = ["Cores"]

_T = TypeVar("_T")


class Cores:
    """The cores that vLLM chose for the thread that runs its steps."""

    def __init__(self) -> None:
        self._chosen: set[int] = set()

    def opened(self, build: Callable[[], _T]) -> _T:
        """What ``build`` returns; this thread may use the same cores as before it."""
        if not hasattr(os, "sched_getaffinity"):
            return build()
        before = os.sched_getaffinity(0)
        try:
            return build()
        finally:
            now = os.sched_getaffinity(0)
            if now != before:
                self._chosen = now
                os.sched_setaffinity(0, before)

    @contextlib.contextmanager
    def bound(self) -> Generator[None, None, None]:
        """This thread uses the chosen cores."""
        if not self._chosen:
            yield
            return
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self._chosen)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)
