"""A device on the CPU whose side streams are as late as events allow them to be, or at once.

Torch does the layers' work as it is called, so the stream that the model runs on never lags: where it waits for a
copy, that copy is done there and then. A copy that nobody waits for is never done, or after its rows were written over;
one that is done at once writes over rows that nobody has taken out yet. A test that compares rows notices all three.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

STALE = -77


class Stream:
    """Work in the order it was queued; ``prompt``: done as it is queued."""

    def __init__(self, name: str, log: list[str], *, prompt: bool) -> None:
        self.name, self.log, self.prompt = name, log, prompt
        self.work: list[Callable[[], object]] = []
        self.done = 0

    def add(self, work: Callable[[], object]) -> None:
        self.work.append(work)
        if self.prompt:
            self.run_to(len(self.work))

    def run_to(self, end: int) -> None:
        while self.done < end:
            self.done += 1
            self.work[self.done - 1]()

    def wait_event(self, event: Event) -> None:
        self.log.append(f"{self.name} waits for {event.name}")
        self.add(event.moment())


class Event:
    """A moment of a stream; never recorded, it is long past."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.name = "nothing"
        self.of: tuple[Stream, int] | None = None

    def record(self, stream: Stream) -> None:
        self.name = f"what {stream.name} has done"
        self.of = (stream, len(stream.work))

    def moment(self) -> Callable[[], object]:
        if self.of is None:
            return lambda: None
        stream, end = self.of
        return lambda: stream.run_to(end)

    def synchronize(self) -> None:
        self.log.append(f"host waits for {self.name}")
        self.moment()()


class SlowDevice:
    """In the place of ``_capture.host.Device``.

    Attributes:
        log: every wait and every copy.
        pinned_rows: rows of each pinned tensor that was made.
    """

    def __init__(self, *, prompt: bool = False) -> None:
        self.log: list[str] = []
        self.pinned_rows: list[int] = []
        self.prompt = prompt
        self.model_stream = Stream("model", self.log, prompt=True)

    def stream(self) -> Stream:
        return Stream("side", self.log, prompt=self.prompt)

    def current_stream(self) -> Stream:
        return self.model_stream

    def event(self) -> Event:
        return Event(self.log)

    def pinned(self, tensor: Any) -> Any:
        self.pinned_rows.append(len(tensor))
        return tensor.new_full(tensor.shape, STALE)

    def copy(self, stream: Stream, pairs: Sequence[tuple[Any, Any]]) -> None:
        for target, source in pairs:
            self.log.append(f"{stream.name} copies {list(source.shape)}")
            stream.add(functools.partial(target.copy_, source))
