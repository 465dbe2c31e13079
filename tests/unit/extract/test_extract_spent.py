"""Time is counted once."""

from __future__ import annotations

import contextlib
import time

import pytest

from vllm_compat.extract.spent import Spent


def test_what_is_counted_inside_is_not_counted_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    spent = Spent()
    for _ in range(2):
        with spent.on("steps"):
            now[0] += 5
            with spent.on("writers"):
                now[0] += 3
            with spent.on("writers"):
                now[0] += 1
            now[0] += 10
        now[0] += 7
    with spent.on("last_files"):
        now[0] += 2
    assert (spent.steps, spent.writers, spent.states, spent.last_files) == (30, 8, 0, 2)
    told = spent.told(now[0])
    assert "30.0 s in steps" in told
    assert "14.0 s between steps" in told


def test_a_block_that_fails_is_counted_too() -> None:
    spent = Spent()
    with contextlib.suppress(ValueError), spent.on("states"):
        time.sleep(0.01)
        raise ValueError
    assert spent.states >= 0.01
