"""SIGINT in a worker's process: passed by while its engine captures, for a child of the engine's process alone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.vllm_tree import importing, write_vllm

from vllm_compat._capture.extension import VllmCompatExtension
from vllm_compat._capture.interrupts import heed_interrupts, ignore_interrupts


@pytest.fixture(autouse=True)
def _handler_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def worker(owner: int, told: Connection) -> None:
    """Tells what two SIGINTs did, one while it is ignored and one after that."""
    seen: list[str] = []
    signal.signal(signal.SIGINT, lambda *_: seen.append("interrupted"))
    before = ignore_interrupts(owner)
    signal.raise_signal(signal.SIGINT)
    seen.append("heeded again")
    heed_interrupts(before)
    signal.raise_signal(signal.SIGINT)
    told.send(seen)


@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize(
    ("own", "wanted"),
    [(True, ["heeded again", "interrupted"]), (False, ["interrupted", "heeded again", "interrupted"])],
)
def test_a_child_of_the_engine_s_process_passes_it_by(start: str, own: bool, wanted: list[str]) -> None:
    context: Any = multiprocessing.get_context(start)
    ours, theirs = context.Pipe()
    process = context.Process(target=worker, args=(os.getpid() if own else 1, theirs))
    process.start()
    try:
        assert ours.poll(60)
        assert ours.recv() == wanted
    finally:
        process.join(60)


def test_the_engine_s_own_process_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is a child of another's: its handler is what finishes a run."""
    before = signal.getsignal(signal.SIGINT)
    assert ignore_interrupts(os.getpid()) is None
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=os.getppid()))
    assert ignore_interrupts(os.getpid()) is None
    assert signal.getsignal(signal.SIGINT) == before


def test_only_the_main_thread_may_set_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=7))
    found: list[Any] = [""]
    thread = threading.Thread(target=lambda: found.append(ignore_interrupts(7)))
    thread.start()
    thread.join()
    assert found == ["", None]


def test_a_worker_ignores_it_as_long_as_it_is_tapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank does, those that capture nothing too."""
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=7))
    facts = {"rank": 1, "world_size": 2}
    state = "".join(f"def get_tensor_model_parallel_{what}():\n    return {n}\n" for what, n in facts.items())
    write_vllm(tmp_path, importable=True, add={"distributed/parallel_state": state})
    before, worker = signal.getsignal(signal.SIGINT), SimpleNamespace()
    with importing(tmp_path):
        VllmCompatExtension.vllm_compat_install(worker, [0], "layer-hooks", 7, shares=True)
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    for _ in range(2):
        VllmCompatExtension.vllm_compat_remove(worker)
        assert signal.getsignal(signal.SIGINT) == before
