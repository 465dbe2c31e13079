"""The shards of a run for replicas that may die: who does which, and what becomes of what a lost one had.

What a replica is, the pool knows: processes of a Ray cluster, or a test's own.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from vllm_compat.errors import VllmCompatError
from vllm_compat.extract.locks import ShardBusyError
from vllm_compat.extract.progress import Progress
from vllm_compat.extract.record import Summary
from vllm_compat.extract.stop import Stop

__all__ = ["Dispatch", "Ended", "Event", "Failed", "Lost", "Opened", "Pool", "ReplicaError", "Told"]

MAX_LOSSES = 3
BUSY_RETRY_S = 1.0
BUSY_LIMIT_S = 120.0
POLL_S = 0.5
_SAY_EVERY_S = 60.0
_FINAL = frozenset({2, 3, 4, 5, 74})
"""Exit codes of errors that the next replica would meet again."""

logger = logging.getLogger(__name__)


class ReplicaError(VllmCompatError):
    """Replicas were lost again and again, without a sample done in between; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A replica has its model."""

    replica: int


@dataclass(frozen=True, slots=True)
class Told:
    """A replica wrote samples; of each its tokens, and its file's size in bytes."""

    replica: int
    samples: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """A replica's shard is done; ``samples`` are those not yet told."""

    replica: int
    summary: Summary
    samples: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """A replica's load, or its shard, ended with an error; ``trace`` is for people."""

    replica: int
    error: VllmCompatError
    trace: str = ""


@dataclass(frozen=True, slots=True)
class Lost:
    """A replica is gone."""

    replica: int
    why: str


Event: TypeAlias = Opened | Told | Ended | Failed | Lost


class Pool(Protocol):
    """Where replicas live. After ``start`` and ``end`` nothing comes any more of the process that was there before."""

    def start(self, replica: int) -> None:
        """Begin a new process, which opens the model."""
        ...

    def work(self, replica: int, shard: int) -> None:
        """Let an open replica do a shard."""
        ...

    def stop(self, replica: int, reason: str) -> None:
        """Let a replica finish what is under way, and no more."""
        ...

    def end(self, replica: int) -> None:
        """End a replica at once."""
        ...

    def events(self, timeout_s: float) -> Sequence[Event]:
        """What has happened; waits for something for a while."""
        ...


@dataclass(slots=True)
class _Replica:
    number: int
    phase: Literal["loading", "idle", "working", "gone"] = "loading"
    shard: int = -1
    size: int = 0  # of the shard's journal when it was handed out
    useful: bool = False  # something was done since the start
    losses: int = 0  # in a row, none of them useful


@dataclass(slots=True)
class _Owed:
    shard: int
    not_before: float = 0.0
    lost_by: int | None = None


@dataclass(slots=True)
class _Sorrows:
    """What went wrong with a shard since something went well."""

    losses: int = 0
    busy_since: float | None = None


@dataclass(slots=True)
class Dispatch:
    """Hands shards to replicas until all are done, or the wish to stop is granted.

    Attributes:
        pool: where the replicas live.
        owed: the shards to be done.
        count: how many shards there are in all.
        replicas: how many to start.
        size_of: the size of a shard's journal, which grows with every sample that is done.
        stop: ends the run early.
        bar: told of every sample.
        summaries: of the shards that are done.
    """

    pool: Pool
    owed: Sequence[int]
    count: int
    replicas: int
    size_of: Callable[[int], int]
    stop: Stop
    bar: Progress | None = None
    summaries: list[Summary] = field(default_factory=list[Summary])
    _team: list[_Replica] = field(default_factory=list[_Replica])
    _queue: deque[_Owed] = field(default_factory=deque[_Owed])
    _sorrows: dict[int, _Sorrows] = field(default_factory=dict[int, _Sorrows])
    _stopping: bool = False

    def run(self) -> bool:
        """Whether all shards are done; else the wish to stop came first.

        Raises:
            ReplicaError: replicas died without end.
            VllmCompatError: of a shard, where every replica would meet it again.
        """
        self._queue.extend(_Owed(shard) for shard in self.owed)
        self._team.extend(_Replica(number) for number in range(min(self.replicas, len(self.owed))))
        for replica in self._team:
            self.pool.start(replica.number)
        said = time.monotonic()
        while self._queue or self._at_work():
            if self.stop.reason:
                self._wind_down()
                if not self._at_work():
                    return False
            else:
                self._hand_out()
            events = self.pool.events(POLL_S)
            for event in events:
                self._take(event)
            if events or self._at_work():
                said = time.monotonic()
            elif time.monotonic() - said > _SAY_EVERY_S:
                said = time.monotonic()
                logger.info("no replica is open; they load the model, or wait for a place in the cluster")
        return True

    def _at_work(self) -> bool:
        return any(replica.phase == "working" for replica in self._team)

    def _hand_out(self) -> None:
        for replica in self._team:
            if replica.phase != "idle":
                continue
            now = time.monotonic()
            owed = next((owed for owed in self._queue if owed.not_before <= now), None)
            if owed is None:
                return
            self._queue.remove(owed)
            if owed.lost_by is not None:
                who = "its successor" if owed.lost_by == replica.number else f"replica {replica.number}"
                logger.info("%s takes over %s of replica %d", who, self._name(owed.shard), owed.lost_by)
            replica.phase, replica.shard, replica.size = "working", owed.shard, self.size_of(owed.shard)
            self.pool.work(replica.number, owed.shard)

    def _wind_down(self) -> None:
        if self._stopping:
            return
        self._stopping = True
        for replica in self._team:
            if replica.phase == "working":
                self.pool.stop(replica.number, self.stop.reason)
            elif replica.phase == "loading":
                self.pool.end(replica.number)

    def _take(self, event: Event) -> None:
        replica = self._team[event.replica]
        match event:
            case Opened():
                replica.phase = "idle"
            case Told():
                self._tell(event.samples)
            case Ended():
                self._tell(event.samples)
                self._sorrows.pop(replica.shard, None)
                self.summaries.append(event.summary)
                replica.phase, replica.useful, replica.losses = "idle", True, 0
                logger.info(
                    "%s is done by replica %d; %d are left",
                    self._name(replica.shard),
                    replica.number,
                    len(self._queue) + sum(other.phase == "working" for other in self._team),
                )
            case Failed():
                self._failed(replica, event)
            case Lost():
                self._lose(replica, event.why)

    def _tell(self, samples: Sequence[tuple[int, int]]) -> None:
        for tokens, size in samples if self.bar else ():
            assert self.bar is not None
            self.bar.advance(tokens, size)

    def _failed(self, replica: _Replica, event: Failed) -> None:
        error = event.error
        if isinstance(error, ShardBusyError):
            self._postpone(replica, error)
        elif error.exit_code in _FINAL:
            raise error
        elif self.stop.reason:
            replica.phase = "gone"
        else:
            if event.trace:
                logger.warning("replica %d:\n%s", replica.number, event.trace.rstrip())
            self._lose(replica, str(error) if type(error) is ReplicaError else f"{type(error).__name__}: {error}")

    def _postpone(self, replica: _Replica, error: ShardBusyError) -> None:
        """The lock of a process that was lost ends with it, which takes its time."""
        sorrows = self._sorrows.setdefault(replica.shard, _Sorrows())
        now = time.monotonic()
        if sorrows.busy_since is None:
            sorrows.busy_since = now
            logger.info("%s is locked by another process; it is tried again for a while", self._name(replica.shard))
        elif now - sorrows.busy_since > BUSY_LIMIT_S:
            raise error
        self._queue.append(_Owed(replica.shard, now + BUSY_RETRY_S))
        replica.phase = "idle"

    def _lose(self, replica: _Replica, why: str) -> None:
        """A replica is gone: its shard goes back to the queue, and another takes its place."""
        self.pool.end(replica.number)
        at_work, load = replica.phase == "working", "while it loaded the model"
        what = self._name(replica.shard) if at_work else load
        if self.stop.reason:
            replica.phase = "gone"
            logger.warning("replica %d was lost (%s), %s", replica.number, what, why)
            return
        shard_losses = 0
        if at_work:
            grown = self.size_of(replica.shard) > replica.size
            replica.useful |= grown
            sorrows = self._sorrows.setdefault(replica.shard, _Sorrows())
            sorrows.losses = shard_losses = 0 if grown else sorrows.losses + 1
            self._queue.append(_Owed(replica.shard, lost_by=replica.number))
        replica.losses = 0 if replica.useful else replica.losses + 1
        replica.useful = False
        if shard_losses >= MAX_LOSSES:
            raise ReplicaError(
                f"{shard_losses} replicas were lost in a row at {what}, and not one sample of it was done in between; "
                f"the last was replica {replica.number}: {why}. What is done is whole. Look into the cause; the same "
                "command then goes on"
            )
        given_up = replica.losses >= MAX_LOSSES
        replica.phase = "gone" if given_up else "loading"
        if all(other.phase == "gone" for other in self._team):
            raise ReplicaError(
                f"every replica was lost {MAX_LOSSES} times in a row without a sample done in between; the last was "
                f"replica {replica.number}, {what}: {why}. What is done is whole. Look into the cause; the same "
                "command then goes on"
            )
        logger.warning(
            "replica %d was lost%s: %s. %s%s",
            replica.number,
            "" if at_work else f" {load}",
            why,
            f"{what} goes back to the queue; " if at_work else "",
            f"it was the {MAX_LOSSES}rd time without a sample done, so it is left to the other replicas"
            if given_up
            else "another is started in its place",
        )
        if not given_up:
            self.pool.start(replica.number)

    def _name(self, shard: int) -> str:
        return f"shard {shard}/{self.count}"
