"""How far a run has come: a bar where a person looks on, else a line in the log now and then."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol, TypeAlias

from vllm_compat.extract.spent import Spent

__all__ = ["Progress", "ProgressFactory", "show"]

_EVERY_S = 30.0

logger = logging.getLogger(__name__)


class Progress(Protocol):
    """What a run tells of its progress."""

    def advance(self, tokens: int, size: int, spent: Spent | None = None) -> None:
        """One more sample is written.

        Args:
            tokens: of the sample.
            size: of its file, in bytes.
            spent: where the run's time has gone so far, where that is known.
        """
        ...

    def close(self) -> None:
        """There is no more to come."""
        ...


ProgressFactory: TypeAlias = Callable[[int], Progress]
"""Makes a ``Progress`` for a number of samples; called when the engine is ready."""


def show(total: int) -> Progress:
    """A bar on stderr if that is a terminal and tqdm is installed, else log lines."""
    if sys.stderr.isatty():
        try:
            return _Bar(total)
        except ImportError:
            logger.info("no progress bar: tqdm is not installed")
    return _Lines(total)


class _Rates:
    """Sums since the start."""

    def __init__(self) -> None:
        self.samples = self.tokens = self.size = 0
        self._spent = Spent()
        self._start = time.monotonic()

    def add(self, tokens: int, size: int, spent: Spent | None) -> None:
        self.samples += 1
        self.tokens += tokens
        self.size += size
        self._spent = spent or self._spent

    def __str__(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-9)
        waits = {"states": self._spent.states, "writers": self._spent.writers}
        stood = [f", {wait / seconds:.0%} waiting for {what}" for what, wait in waits.items() if wait >= 0.01 * seconds]
        return f"{self.tokens / seconds:.0f} tok/s, {self.size / 1e6 / seconds:.1f} MB/s{''.join(stood)}"


class _Bar:
    def __init__(self, total: int) -> None:
        self._bar: Any = import_module("tqdm").tqdm(total=total, unit="sample", file=sys.stderr)
        self._rates = _Rates()

    def advance(self, tokens: int, size: int, spent: Spent | None = None) -> None:
        self._rates.add(tokens, size, spent)
        self._bar.set_postfix_str(str(self._rates), refresh=False)
        self._bar.update(1)

    def close(self) -> None:
        self._bar.close()


class _Lines:
    def __init__(self, total: int) -> None:
        self._total = total
        self._rates = _Rates()
        self._said = time.monotonic()

    def advance(self, tokens: int, size: int, spent: Spent | None = None) -> None:
        self._rates.add(tokens, size, spent)
        if time.monotonic() - self._said >= _EVERY_S:
            self._said = time.monotonic()
            logger.info("%d of %d samples, %s", self._rates.samples, self._total, self._rates)

    def close(self) -> None:
        """Nothing to end."""
