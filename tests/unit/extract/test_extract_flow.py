"""The flow of an extraction: how many samples, the queue, warnings and progress."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from vllm_compat.errors import UsageError
from vllm_compat.extract import extract, files
from vllm_compat.extract.spent import Spent
from vllm_compat.extract.writers import Writers
from vllm_compat.testing import FakeEngine
from vllm_compat.types import CapturedStates, StepResult

if TYPE_CHECKING:
    from tests.unit.extract.conftest import (
        MakeConfig,
        MakeEngine,
        SamplesIn,
        SomeRows,
        WriteRows,
    )


def test_num_samples(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, some_rows: SomeRows, samples_in: SamplesIn
) -> None:
    write_rows(some_rows(5))
    settings = config(num_samples=3)
    assert extract(settings, make_engine()).samples == 3
    assert len(samples_in(Path(settings.output_dir))) == 3


def test_fewer_samples_than_asked_for_are_warned_of(
    config: MakeConfig,
    make_engine: MakeEngine,
    write_rows: WriteRows,
    caplog: pytest.LogCaptureFixture,
    some_rows: SomeRows,
) -> None:
    write_rows(some_rows(2))
    assert extract(config(num_samples=3), make_engine()).samples == 2
    assert "3 samples were asked for, the file has 2" in caplog.text


def test_what_surely_does_not_fit_is_refused_before_the_load(
    config: MakeConfig, write_rows: WriteRows, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows([{"input_ids": [1, 2]}])
    found = os.statvfs(Path(config().output_dir).parent)
    none_free = os.statvfs_result([*found[:4], 0, *found[5:]])
    monkeypatch.setattr("vllm_compat.extract.estimate.os.statvfs", lambda _: none_free)
    caplog.set_level(logging.INFO, "vllm_compat")
    with pytest.raises(UsageError, match=r"has 0\.000 GB free"):
        extract(config())
    assert "samples: 1, 2 tokens" in caplog.text, "the figures are said before"


class Watched(FakeEngine):
    """Notes how many requests wait in each step, and how many it was given by then."""

    seen: list[tuple[int, int]]

    def run_step(self, meanwhile: Any = None) -> StepResult:
        self.seen.append((len(self._queue), self._given))
        return super().run_step(meanwhile)

    _given = 0

    def make_request(self, *args: Any, **options: Any) -> Any:
        self._given += 1
        return super().make_request(*args, **options)


def test_the_queue_is_kept_filled_and_never_overfilled(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows
) -> None:
    write_rows([{"input_ids": [n] * (1 + n % 13)} for n in range(40)])
    engine = make_engine(Watched, max_num_seqs=3, max_num_batched_tokens=8)
    assert isinstance(engine, Watched)
    engine.seen = []
    extract(config(batch_size=3), engine)
    # Samples are queued beside a step, before it is known which of those in it end.
    assert all(waiting >= 3 for waiting, given in engine.seen if given < 40), "no barrier between batches"
    assert max(waiting for waiting, _ in engine.seen) == 6
    assert engine.seen[-1][1] == 40


def test_samples_are_queued_as_steps_need_them_and_not_all_at_once(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many may be under way, the first step need not wait until all are read."""
    monkeypatch.setattr("vllm_compat.extract.run._TOKENS_AT_ONCE", 8)
    write_rows([{"input_ids": [n] * 4} for n in range(40)])
    engine = make_engine(Watched, max_num_seqs=64, max_num_batched_tokens=20)
    assert isinstance(engine, Watched)
    engine.seen = []
    extract(config(batch_size=64), engine)
    queued = [given for _, given in engine.seen]
    assert queued[:5] == [2, 4, 8, 12, 20], "8 tokens, then twice what the largest step so far took"
    assert all(later - earlier <= 10 for earlier, later in pairwise(queued))
    assert all(waiting >= 5 for waiting, given in engine.seen[4:] if given < 40)


def test_progress_is_told_of_every_file_and_closed(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, some_rows: SomeRows
) -> None:
    class Count:
        def __init__(self, total: int) -> None:
            self.total, self.tokens, self.sizes, self.closed = total, 0, 0, 0
            self.spent: Spent | None = None
            made.append(self)

        def advance(self, tokens: int, size: int, spent: Spent | None = None) -> None:
            self.tokens, self.sizes, self.spent = self.tokens + tokens, self.sizes + size, spent

        def close(self) -> None:
            self.closed += 1

    made: list[Count] = []
    write_rows(some_rows(4))
    summary = extract(config(), make_engine(), Count)
    [count] = made
    assert (count.total, count.tokens, count.sizes, count.closed) == (4, summary.tokens, summary.bytes, 1)
    assert count.spent is not None
    assert count.spent.steps > 0


class Busy(FakeEngine):
    """Knows whether the device is at work."""

    at_work = False

    def run_step(self, meanwhile: Callable[[], None] | None = None) -> StepResult:
        def beside() -> None:
            self.at_work = True
            if meanwhile:
                meanwhile()
            self.at_work = False

        return super().run_step(beside)


def test_writers_get_their_work_while_the_device_has_its_own(
    config: MakeConfig,
    make_engine: MakeEngine,
    write_rows: WriteRows,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine: Any = make_engine(Busy, max_num_batched_tokens=20)
    submit, seen = Writers.submit, []

    def watched(self: Any, sample: Any, states: Any) -> None:
        seen.append((sample.index, engine.at_work))
        submit(self, sample, states)

    monkeypatch.setattr(Writers, "submit", watched)
    write_rows([{"input_ids": [n] * 10} for n in range(10)])
    assert extract(config(batch_size=4), engine).complete
    assert [index for index, _ in seen] == list(range(10))
    assert [beside for _, beside in seen] == [True] * 8 + [False] * 2, "all but the last step's"


class Slow(FakeEngine):
    """Takes its time, over steps and over the last states."""

    def run_step(self, meanwhile: Callable[[], None] | None = None) -> StepResult:
        time.sleep(0.02)
        return super().run_step(meanwhile)

    def get_captured_states(self, *, wait: bool = True) -> list[CapturedStates]:
        time.sleep(0.15 if wait else 0)
        return super().get_captured_states(wait=wait)


def test_it_is_said_where_the_time_went(
    config: MakeConfig,
    make_engine: MakeEngine,
    write_rows: WriteRows,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write = files.write_whole

    def slow(*args: Any, **options: Any) -> int:
        time.sleep(0.25)
        return write(*args, **options)

    monkeypatch.setattr("vllm_compat.extract.store.write_whole", slow)
    write_rows([{"input_ids": [n] * 10} for n in range(8)])
    caplog.set_level(logging.INFO, "vllm_compat")
    # Eight samples in two steps; one waits while another is written, and the third must wait for room.
    extract(config(batch_size=4, writers=1, max_pending_bytes=1), make_engine(Slow, max_num_batched_tokens=40))
    (said,) = [re.findall(r"[\d.]+", line) for line in caplog.messages if " s in steps, " in line]
    whole, steps, states, writers, last, between = map(float, said)
    assert abs(whole - (steps + states + writers + last + between)) < 0.3
    assert (round(states, 1), last >= 0.2, writers >= 1.0) == (0.2, True, True), said
    assert 0.0 <= steps < 0.2
