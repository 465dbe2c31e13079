"""The cores that vLLM binds a thread to while an engine is opened: kept for steps, and for nothing else."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.unit.recording_engine import recorded_engine
from tests.unit.vllm_tree import importing

from vllm_compat._engine.cores import Cores

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2, reason="wants Linux and two cores"
)


def bind() -> str:
    """What vLLM does while an engine is built on a CPU."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    return "built"


def fail() -> str:
    bind()
    raise ValueError("no memory")


def inherited() -> set[int]:
    """The cores of a thread that is started now, such as a writer of files."""
    found: list[set[int]] = []
    thread = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
    thread.start()
    thread.join()
    return found[0]


def test_what_is_started_after_the_opening_may_use_every_core() -> None:
    before = os.sched_getaffinity(0)
    assert Cores().opened(bind) == "built"
    assert os.sched_getaffinity(0) == inherited() == before
    with pytest.raises(ValueError, match="no memory"):
        Cores().opened(fail)
    assert os.sched_getaffinity(0) == before


def test_steps_are_run_on_the_cores_that_vllm_chose(tmp_path: Path) -> None:
    before, seen = os.sched_getaffinity(0), []
    with importing(tmp_path):
        engine: Any = recorded_engine(tmp_path, ())
        engine._cores.opened(bind)
        engine.make_request([1, 2], ignore_eos=True)
        engine.run_step(lambda: seen.append(os.sched_getaffinity(0)))
        assert seen == [{min(before)}]
        assert os.sched_getaffinity(0) == before
        engine.make_request([3])
        engine.executor.failure = RuntimeError("of a step")
        with pytest.raises(Exception, match="of a step"):
            engine.run_step()
    assert os.sched_getaffinity(0) == before


def test_where_vllm_binds_nothing_nothing_is_bound() -> None:
    cores, before = Cores(), os.sched_getaffinity(0)
    cores.opened(lambda: None)
    with cores.bound():
        assert os.sched_getaffinity(0) == before
