"""Rows lent to another process: what arrives, when a block is used again, and what happens where it cannot be lent."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_compat._capture import lending
from vllm_compat._capture.lending import Borrower, LendingMemory, Lent

torch: Any = pytest.importorskip("torch")

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="wants Linux")
LIKE = [torch.zeros(1, dtype=torch.int64), torch.zeros(1, 4, 64, dtype=torch.bfloat16)]
ROWS = 500


def work(pipe: Any) -> None:
    """A worker: lends rows filled with a number, and takes back."""
    memory = LendingMemory()
    pipe.send(memory.probe())
    for returned, number in iter(pipe.recv, None):
        memory.returned(returned)
        room = memory.room(ROWS, LIKE)
        room.tensors[0].copy_(torch.arange(ROWS) + number)
        room.tensors[1].fill_(number)
        pipe.send((memory.lend(room), memory.gone()))


@pytest.fixture(scope="module")
def started() -> Iterator[tuple[Any, Lent]]:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=work, args=(there,), daemon=True)
    process.start()
    yield here, here.recv()
    process.kill()
    process.join()


def test_rows_of_another_process_are_read_in_place_and_their_memory_is_used_again(started: tuple[Any, Lent]) -> None:
    pipe, probe = started
    borrower = Borrower()
    assert borrower.reaches(probe)
    held: list[Any] = []
    blocks = set()
    for number in range(20):
        pipe.send((borrower.returned().get(probe.worker, []), number))
        lent, gone = pipe.recv()
        assert gone == []
        blocks.add(lent.number)
        held.append((number, *borrower.tensors(lent)))
        del held[:-3]  # three are held at once
        for of, ids, states in held:
            assert ids.tolist() == list(range(of, of + ROWS))
            assert (states.dtype, tuple(states.shape)) == (torch.bfloat16, (ROWS, 4, 64))
            assert states.unique().tolist() == [of]
    assert len(blocks) <= 5
    assert len(borrower._mappings) == len(blocks)


def test_what_is_held_outlives_the_worker() -> None:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=work, args=(there,), daemon=True)
    process.start()
    here.recv()
    borrower = Borrower()
    here.send(([], 7))
    _, states = borrower.tensors(here.recv()[0])
    process.kill()
    process.join()
    assert states.unique().tolist() == [7]


@pytest.mark.parametrize("fact", ["process", "descriptor", "worker"])
def test_a_worker_that_cannot_be_looked_into_is_not_near(fact: str) -> None:
    memory, borrower = LendingMemory(), Borrower()
    probe = memory.probe()
    assert probe is not None
    assert borrower.reaches(probe)
    others = {
        "process": replace(probe, process=2**22 - 1),
        "descriptor": replace(probe, descriptor=10**6),
        "worker": replace(probe, worker="another machine"),
    }
    assert not borrower.reaches(others[fact])
    assert not borrower.reaches(None)
    with Path(os.devnull).open("rb") as foreign:
        assert not borrower.reaches(replace(probe, descriptor=foreign.fileno())), "it is not even opened"
    memory.close()
    assert not borrower.reaches(probe)


def test_rows_that_need_no_block_go_the_ordinary_way() -> None:
    memory = LendingMemory()
    assert memory.lend(memory.room(2, LIKE)) is None


def open_files() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def test_there_are_only_so_many_blocks_and_no_file_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_files()
    monkeypatch.setattr(lending, "_MOST_BLOCKS", 4)
    memory, borrower = LendingMemory(), Borrower()
    rooms = [memory.room(ROWS, LIKE) for _ in range(5)]
    assert [room.block is not None for room in rooms] == [True, True, True, False, False]  # one is the probe's
    lent = memory.lend(rooms[0])
    assert lent is not None
    tensors = borrower.tensors(lent)
    rooms.clear()
    large = memory.room(10 * ROWS, LIKE)
    assert large.block is not None, "a free one was given up for it"
    borrower.forget(memory.worker, memory.gone())
    del tensors, large
    memory.returned(borrower.returned()[memory.worker])
    memory.close()
    borrower.forget(memory.worker, memory.gone())
    assert borrower._mappings == {}
    assert open_files() == before


def test_without_a_file_to_be_had_rows_are_in_ordinary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: Any) -> int:
        raise OSError(24, "Too many open files")

    memory = LendingMemory()
    monkeypatch.setattr(os, "memfd_create", none_left)
    room = memory.room(ROWS, LIKE)
    assert room.block is None
    assert tuple(room.tensors[1].shape) == (ROWS, 4, 64)
    assert LendingMemory().probe() is None
