"""Writing beside the engine: a few threads, and a bound on what may wait for them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

from vllm_compat.extract.inputs import Sample
from vllm_compat.extract.journal import Entry
from vllm_compat.types import Tensor

__all__ = ["Writers"]

_MOST_WAITING = 256  # samples of a few tokens are small, and what Python needs for each of them is not


class HasStates(Protocol):
    """What is written beside a sample."""

    @property
    def hidden_states(self) -> Sequence[Tensor]:
        """What memory it holds as long as it waits."""
        ...


_States = TypeVar("_States", bound=HasStates)


class Writers(Generic[_States]):
    """Threads that write what one thread, the engine's, submits.

    Attributes:
        stalled: seconds that ``submit`` waited for room.
    """

    def __init__(
        self, write: Callable[[Sample, _States], Entry | None], *, threads: int, max_pending_bytes: int
    ) -> None:
        """Start them.

        Args:
            write: writes one sample; None for one that is no longer wanted.
            threads: how many write at once.
            max_pending_bytes: of states that wait or are being written; one sample may be larger. No more than 256
                samples wait, whatever their size.
        """
        self.stalled = 0.0
        self._write = write
        self._most = max_pending_bytes
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="vllm-compat-writer")
        self._changed = threading.Condition()
        self._pending = 0
        self._waiting = 0
        self._written: deque[Entry] = deque()
        self._error: BaseException | None = None

    def submit(self, sample: Sample, states: _States) -> None:
        """Hand a sample over; waits while too much is pending.

        Raises:
            BaseException: the first that a writer raised.
        """
        size = sum(getattr(tensor, "nbytes", 0) for tensor in states.hidden_states)
        with self._changed:
            if not self._has_room(size):
                start = time.monotonic()
                self._changed.wait_for(lambda: self._has_room(size))
                self.stalled += time.monotonic() - start
            if self._error:
                raise self._error
            self._pending += size
            self._waiting += 1
        self._threads.submit(self._work, sample, states, size)

    def written(self) -> list[Entry]:
        """What was written since the last call."""
        return [self._written.popleft() for _ in range(len(self._written))]

    def close(self) -> None:
        """Wait until all is written; safe to call twice.

        Raises:
            BaseException: the first that a writer raised.
        """
        self._threads.shutdown(wait=True)
        if self._error:
            raise self._error

    def _has_room(self, size: int) -> bool:
        if self._error or not self._waiting:
            return True
        return self._waiting < _MOST_WAITING and self._pending + size <= self._most

    def _work(self, sample: Sample, states: _States, size: int) -> None:
        try:
            entry = self._write(sample, states)
            if entry is not None:
                self._written.append(entry)
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
        finally:
            with self._changed:
                self._pending -= size
                self._waiting -= 1
                self._changed.notify_all()
