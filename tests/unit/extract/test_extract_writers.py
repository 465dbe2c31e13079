"""Writing beside the engine: bounded, the first error ends it, and nothing is committed after that."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from vllm_compat.extract import extract, files
from vllm_compat.extract.inputs import Sample
from vllm_compat.extract.journal import Entry, read_journal
from vllm_compat.extract.writers import Writers
from vllm_compat.types import CapturedStates

if TYPE_CHECKING:
    from tests.unit.extract.conftest import MakeConfig, MakeEngine, SomeRows, WriteRows

SIZE = 800  # bytes of states of one sample below


def sample(index: int) -> tuple[Sample, CapturedStates]:
    states = CapturedStates(f"sample-{index}", (1,), 1, (2,), (0,), (np.zeros((1, 100)),), "length")
    return Sample(index, index + 1, None, (1,), None, False), states


def entry(index: int) -> Entry:
    return Entry(index, f"hs_{index}.safetensors", 1, "0" * 16, 1, 2)


class Gate:
    """A writer that is let through one sample at a time, and notes how many it is at."""

    def __init__(self) -> None:
        self.open = threading.Semaphore(0)
        self.started: list[int] = []

    def __call__(self, which: Sample, _: CapturedStates) -> Entry:
        self.started.append(which.index)
        assert self.open.acquire(timeout=30)
        return entry(which.index)


def eventually(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 30
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    return condition()


def test_submitting_waits_when_too_much_is_pending() -> None:
    gate = Gate()
    writers = Writers(gate, threads=2, max_pending_bytes=3 * SIZE)
    for index in range(3):
        writers.submit(*sample(index))
    assert eventually(lambda: sorted(gate.started) == [0, 1]), "two threads, the third sample waits"
    blocked = threading.Thread(target=lambda: writers.submit(*sample(3)))
    blocked.start()
    blocked.join(0.1)
    assert blocked.is_alive()
    gate.open.release()
    blocked.join(30)
    assert not blocked.is_alive()
    assert writers.stalled >= 0.09
    gate.open.release(3)
    writers.close()
    assert sorted(e.index for e in writers.written()) == [0, 1, 2, 3]
    assert writers.written() == []


def test_small_samples_are_bounded_by_their_number() -> None:
    gate = Gate()
    writers = Writers(gate, threads=2, max_pending_bytes=1 << 40)
    for index in range(256):
        writers.submit(*sample(index))
    blocked = threading.Thread(target=lambda: writers.submit(*sample(256)))
    blocked.start()
    blocked.join(0.05)
    assert blocked.is_alive()
    gate.open.release(257)
    blocked.join(30)
    writers.close()
    assert len(writers.written()) == 257


def test_a_sample_larger_than_the_bound_goes_alone() -> None:
    gate = Gate()
    writers = Writers(gate, threads=2, max_pending_bytes=1)
    gate.open.release(3)
    for index in range(3):
        writers.submit(*sample(index))
    writers.close()
    assert [e.index for e in writers.written()] == [0, 1, 2]


def test_the_first_error_is_raised_where_samples_are_submitted() -> None:
    errors = [ValueError("first"), ValueError("second")]

    def write(which: Sample, _: CapturedStates) -> Entry:
        raise errors[which.index]

    writers = Writers(write, threads=1, max_pending_bytes=10 * SIZE)
    writers.submit(*sample(0))
    assert eventually(lambda: writers._error is not None)
    with pytest.raises(ValueError, match="first"):
        writers.submit(*sample(1))
    with pytest.raises(ValueError, match="first"):
        writers.close()


def test_an_error_ends_a_wait() -> None:
    release = threading.Event()

    def write(_: Sample, __: CapturedStates) -> Entry:
        release.wait(30)
        raise ValueError("while you waited")

    writers = Writers(write, threads=1, max_pending_bytes=SIZE)
    writers.submit(*sample(0))
    threading.Timer(0.05, release.set).start()
    with pytest.raises(ValueError, match="while you waited"):
        writers.submit(*sample(1))
    with pytest.raises(ValueError, match="while you waited"):
        writers.close()


def test_nothing_is_committed_after_an_error(
    config: MakeConfig,
    make_engine: MakeEngine,
    write_rows: WriteRows,
    some_rows: SomeRows,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight samples are being written when one of them fails; the seven others are not committed any more."""
    write_rows(some_rows(8))
    barrier = threading.Barrier(8, timeout=30)
    failed = threading.Event()
    real = files._write

    def write(path: Path, parts: Any) -> int:
        if path.name.startswith(".hs_"):
            barrier.wait()
            if path.name.startswith(".hs_5."):
                failed.set()
                raise OSError(5, "Input/output error")
            failed.wait(30)
            time.sleep(0.05)
        return real(path, parts)

    monkeypatch.setattr(files, "_write", write)
    with pytest.raises(Exception, match=r"hs_5\.safetensors cannot be written: Input/output error"):
        extract(config(writers=8, batch_size=8), make_engine())
    assert list(read_journal(Path(config().output_dir) / "journal-0-of-1.jsonl", 8)) == []


@pytest.mark.parametrize(("writers", "pending"), [(1, 1), (1, 2 << 30), (4, 1), (4, 2 << 30)])
def test_any_number_of_writers_and_any_bound(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, some_rows: SomeRows, writers: int, pending: int
) -> None:
    write_rows(some_rows(9))
    summary = extract(config(writers=writers, max_pending_bytes=pending), make_engine())
    assert summary.complete
    assert 0 <= summary.stalled <= summary.seconds
