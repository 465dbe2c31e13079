"""Which replica does which shard, and what becomes of a lost one's; without Ray."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from vllm_compat.errors import InputError, StepError, StoppedError, StorageError, UsageError, VllmCompatError
from vllm_compat.extract import dispatch as module
from vllm_compat.extract.dispatch import Dispatch, Ended, Event, Failed, Lost, Opened, ReplicaError, Told
from vllm_compat.extract.locks import ShardBusyError
from vllm_compat.extract.record import Summary
from vllm_compat.extract.spent import Spent
from vllm_compat.extract.stop import Stop

SUMMARY = Summary(1, 1, 1, 1.0, 0, 1.0, "", complete=False, kept=0, skipped=0, stalled=0.0)
ENDED = "ended"
Fate = str | VllmCompatError  # ENDED, why it was lost, or how it failed


@dataclass
class FakePool:
    """Replicas whose every load and shard ends as a script says; one thing happens at a time, the oldest first."""

    fate_of: Callable[[int, int], Fate] = lambda _replica, _shard: ENDED
    load_of: Callable[[int], Fate] = lambda _replica: ENDED
    stop: Stop | None = None
    stop_after: int = 10**6
    grows: bool = False
    done: list[int] = field(default_factory=list[int])
    log: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    sizes: dict[int, int] = field(default_factory=dict[int, int])
    under_way: dict[int, int | None] = field(default_factory=dict[int, "int | None"])
    stopped: set[int] = field(default_factory=set[int])

    def start(self, replica: int) -> None:
        self.end(replica)
        self.log.append(("start", replica))
        self.under_way[replica] = None

    def work(self, replica: int, shard: int) -> None:
        assert replica not in self.under_way, "it has something to do"
        self.log.append((f"shard {shard}", replica))
        self.under_way[replica] = shard

    def stop_replica(self, replica: int, reason: str) -> None:
        assert reason == "SIGTERM"
        self.log.append(("stop", replica))
        self.stopped.add(replica)

    def end(self, replica: int) -> None:
        self.log.append(("end", replica))
        self.under_way.pop(replica, None)

    def events(self, timeout_s: float) -> Sequence[Event]:
        if not self.under_way:
            return []
        replica = next(iter(self.under_way))
        shard = self.under_way.pop(replica)
        fate = self.load_of(replica) if shard is None else self.fate_of(replica, shard)
        if replica in self.stopped:
            fate = StoppedError("stopped by SIGTERM", reason="SIGTERM")
        if isinstance(fate, VllmCompatError):
            return [Failed(replica, fate, "Traceback ...")]
        if fate != ENDED:
            if shard is not None and self.grows:
                self.sizes[shard] = self.sizes.get(shard, 0) + 1
            return [Lost(replica, fate)]
        if shard is None:
            return [Opened(replica)]
        self.done.append(shard)
        if self.stop and len(self.done) >= self.stop_after:
            self.stop.request("SIGTERM")
        return [Told(replica, ((3, 30),)), Ended(replica, SUMMARY, ((4, 40),))]


@dataclass
class Adapted:
    """``FakePool`` has a field of the name ``stop``."""

    pool: FakePool

    def start(self, replica: int) -> None:
        self.pool.start(replica)

    def work(self, replica: int, shard: int) -> None:
        self.pool.work(replica, shard)

    def stop(self, replica: int, reason: str) -> None:
        self.pool.stop_replica(replica, reason)

    def end(self, replica: int) -> None:
        self.pool.end(replica)

    def events(self, timeout_s: float) -> Sequence[Event]:
        return self.pool.events(timeout_s)


def dispatch(pool: FakePool, shards: int = 6, replicas: int = 2) -> Dispatch:
    stop = pool.stop or Stop()
    return Dispatch(Adapted(pool), range(shards), shards, replicas, lambda shard: pool.sizes.get(shard, 0), stop)


class Counting:
    """A ``Progress``."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []

    def advance(self, tokens: int, size: int, spent: Spent | None = None) -> None:
        self.told.append((tokens, size))

    def close(self) -> None:
        raise AssertionError("it belongs to the caller")


def test_every_shard_is_done_once_and_told() -> None:
    pool, bar = FakePool(), Counting()
    work = dispatch(pool)
    work.bar = bar
    assert work.run() is True
    assert sorted(pool.done) == list(range(6))
    assert work.summaries == [SUMMARY] * 6
    assert bar.told == [(3, 30), (4, 40)] * 6


def test_no_more_replicas_than_shards() -> None:
    pool = FakePool()
    assert dispatch(pool, shards=2, replicas=5).run()
    assert [what for what in pool.log if what[0] == "start"] == [("start", 0), ("start", 1)]


def test_the_shard_of_a_lost_replica_is_done_by_another(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vllm_compat")
    lost: list[tuple[int, int]] = []

    def fate(replica: int, shard: int) -> Fate:
        if replica == 1 and not lost:
            lost.append((replica, shard))
            return "its node is gone"
        return ENDED

    pool = FakePool(fate)
    assert dispatch(pool).run()
    assert sorted(pool.done) == list(range(6)), "none is missing, none is done twice"
    shard = lost[0][1]
    assert [what for what, _ in pool.log].count(f"shard {shard}") == 2
    assert [what for what in pool.log if what[0] == "start"] == [("start", 0), ("start", 1), ("start", 1)]
    assert f"replica 1 was lost: its node is gone. shard {shard}/6 goes back to the queue; another is" in caplog.text
    assert f"takes over shard {shard}/6 of replica 1" in caplog.text


def test_a_step_that_failed_costs_the_replica_and_not_the_run(caplog: pytest.LogCaptureFixture) -> None:
    failures = [StepError("a step failed inside vLLM"), ValueError]

    def fate(replica: int, shard: int) -> Fate:
        return StepError("a step failed inside vLLM") if failures and failures.pop() else ENDED

    pool = FakePool(fate)
    assert dispatch(pool).run()
    assert sorted(pool.done) == list(range(6))
    assert "StepError: a step failed inside vLLM" in caplog.text
    assert "Traceback ..." in caplog.text


def test_a_shard_that_every_replica_dies_of_ends_the_run() -> None:
    pool = FakePool(lambda replica, shard: "killed" if shard == 3 else ENDED)
    with pytest.raises(ReplicaError, match=r"3 replicas were lost in a row at shard 3/6, .* \d: killed") as caught:
        dispatch(pool).run()
    assert caught.value.exit_code == 1
    assert sorted(pool.done) == [0, 1, 2, 4, 5], "the others are done before it is tried again and again"


def test_a_replica_that_never_loads_is_left_out_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    pool = FakePool(load_of=lambda replica: "no memory" if replica == 1 else ENDED)
    assert dispatch(pool).run()
    assert sorted(pool.done) == list(range(6))
    assert [what for what in pool.log if what == ("start", 1)] == [("start", 1)] * module.MAX_LOSSES
    assert "replica 1 was lost while it loaded the model: no memory. it was the 3rd time" in caplog.text


def test_no_replica_loads() -> None:
    pool = FakePool(load_of=lambda _: ReplicaError("RuntimeError: no memory"))
    with pytest.raises(ReplicaError, match=r"every replica was lost 3 times .* while it loaded the model: .*no memory"):
        dispatch(pool).run()
    assert len([what for what in pool.log if what[0] == "start"]) == 2 * module.MAX_LOSSES


def test_losses_do_not_count_as_long_as_samples_are_done() -> None:
    deaths = iter(range(20))
    pool = FakePool(lambda *_: "preempted" if next(deaths, None) is not None else ENDED, grows=True)
    assert dispatch(pool).run()
    assert sorted(pool.done) == list(range(6))


@pytest.mark.parametrize(
    "error",
    [
        UsageError("2"),
        InputError("data", []),
        StorageError("full", path="x", errno=28),
    ],
)
def test_an_error_that_the_next_would_meet_ends_the_run(error: VllmCompatError) -> None:
    pool = FakePool(lambda _, shard: error if shard == 2 else ENDED)
    with pytest.raises(type(error)) as caught:
        dispatch(pool).run()
    assert caught.value is error
    assert pool.log.count(("shard 2", 0)) + pool.log.count(("shard 2", 1)) == 1


def test_such_an_error_of_a_load() -> None:
    with pytest.raises(UsageError, match="no such option"):
        dispatch(FakePool(load_of=lambda _: UsageError("no such option"))).run()


def test_a_lock_that_is_still_held_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUSY_RETRY_S", 0.01)
    busy = [ShardBusyError("another process")] * 3
    pool = FakePool(lambda _, shard: busy.pop() if shard == 1 and busy else ENDED)
    assert dispatch(pool).run()
    assert sorted(pool.done) == list(range(6))
    assert not [what for what in pool.log if what[0] == "start"][2:], "the replica is as good as before"


def test_a_lock_that_stays_is_somebody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUSY_RETRY_S", 0.01)
    monkeypatch.setattr(module, "BUSY_LIMIT_S", 0.1)
    pool = FakePool(lambda _, shard: ShardBusyError("another process") if shard == 1 else ENDED)
    with pytest.raises(ShardBusyError):
        dispatch(pool).run()
    assert sorted(pool.done) == [0, 2, 3, 4, 5]


def test_a_wish_to_stop_is_passed_on_and_waited_for() -> None:
    pool = FakePool(stop=Stop(), stop_after=2)
    work = dispatch(pool)
    assert work.run() is False
    assert len(pool.done) == 2
    assert len(work.summaries) == 2
    stops = [what for what in pool.log if what[0] == "stop"]
    starts = [what for what in pool.log if what[0].startswith("shard")]
    assert len(stops) == len(starts) - len(pool.done) == 1, "only those at work, and each once"
    assert not pool.under_way


def test_a_replica_that_still_loads_is_not_waited_for_at_a_stop() -> None:
    pool = FakePool(stop=Stop())
    assert pool.stop
    pool.stop.request("SIGTERM")
    assert dispatch(pool).run() is False
    assert pool.done == []
    assert pool.log[-2:] == [("end", 0), ("end", 1)]


def test_a_replica_that_is_lost_at_a_stop_is_not_replaced() -> None:
    pool = FakePool(stop=Stop())

    def fate(*_: int) -> Fate:
        assert pool.stop
        pool.stop.request("SIGTERM")
        return "killed"

    pool.fate_of = fate
    assert dispatch(pool, replicas=1).run() is False
    assert [what for what in pool.log if what[0] == "start"] == [("start", 0)]


def test_a_stop_that_comes_with_the_last_shard_is_no_stop() -> None:
    assert dispatch(FakePool(stop=Stop(), stop_after=6)).run() is True
