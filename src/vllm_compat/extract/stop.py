"""The wish to end a run early: of a signal, or of another thread."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Generator, Iterator
from types import FrameType
from typing import TypeVar

__all__ = ["Stop", "stop_on_signals"]

_T = TypeVar("_T")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """A wish to end a run early; ``extract`` heeds it between samples.

    Attributes:
        reason: what asked for it; empty as long as nothing did.
        heeded: whether a run is where it heeds it. Elsewhere, as while a model loads, only an exception ends it.
    """

    def __init__(self) -> None:
        self.reason = ""
        self.heeded = False

    def request(self, reason: str) -> None:
        """Finish what is under way, and no more."""
        self.reason = self.reason or reason

    @contextlib.contextmanager
    def heeding(self) -> Generator[None, None, None]:
        """While it is heeded."""
        self.heeded = True
        try:
            yield
        finally:
            self.heeded = False

    def until(self, items: Iterator[_T]) -> Iterator[_T]:
        """The items, up to the wish."""
        while not self.reason:
            try:
                yield next(items)
            except StopIteration:
                return


@contextlib.contextmanager
def stop_on_signals() -> Generator[Stop, None, None]:
    """A ``Stop`` that the first SIGINT or SIGTERM requests; a second one ends the process at once.

    Where a run does not heed it, ``KeyboardInterrupt`` is raised instead. For the main thread; the handlers of before
    are put back at the end.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, _frame: FrameType | None) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        stop.request(signal.Signals(number).name)
        if not stop.heeded:
            raise KeyboardInterrupt
        # Not by way of a logger: the signal may have come while it was writing.
        os.write(2, f"{stop.reason}: finishing what is under way; a second signal ends this at once\n".encode())

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
