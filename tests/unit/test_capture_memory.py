"""Memory that is used again: when, how much of it, and whose it is meanwhile."""

from __future__ import annotations

import gc
import mmap
import threading
from typing import Any

import pytest

from vllm_compat._capture import memory as module
from vllm_compat._capture.memory import LEAST, Memory, Room

torch: Any = pytest.importorskip("torch")

WIDTH = 1024  # of 4 bytes


def kinds(*widths: int) -> list[Any]:
    """A row: its token id, and so many floats of each kind."""
    return [torch.zeros(1, dtype=torch.int64), *(torch.zeros(1, 2, width // 2) for width in widths)]


def address(room: Room) -> int:
    found: int = room.tensors[0].data_ptr()
    return found


@pytest.mark.parametrize("rows", [1, 3, 100, 1000])
@pytest.mark.parametrize("widths", [(WIDTH,), (2, 6)])
def test_room_is_as_asked_for_and_no_two_tensors_touch(rows: int, widths: tuple[int, ...]) -> None:
    room = Memory().room(rows, kinds(*widths))
    assert [(t.dtype, tuple(t.shape)) for t in room.tensors] == [
        (torch.int64, (rows,)),
        *((torch.float32, (rows, 2, width // 2)) for width in widths),
    ]
    for number, tensor in enumerate(room.tensors):
        tensor.fill_(number)
    for number, tensor in enumerate(room.tensors):
        assert not tensor.is_inference()
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        assert tensor.unique().tolist() == [number]
    assert (room.block is not None) == (sum(t.nbytes for t in room.tensors) >= LEAST)


def test_room_is_given_out_again_once_its_last_tensor_is_gone() -> None:
    memory = Memory()
    first = memory.room(100, kinds(WIDTH))
    where, states = address(first), first.tensors[1]
    column = states[:, 1]
    del first, states
    other = memory.room(100, kinds(WIDTH))
    assert address(other) != where, "somebody holds a view of it"
    del column
    assert address(memory.room(90, kinds(WIDTH))) == where


def test_what_another_thread_drops_comes_back_too() -> None:
    memory = Memory()
    rooms = [memory.room(100, kinds(WIDTH)) for _ in range(8)]
    known = {address(room) for room in rooms}
    thread = threading.Thread(target=rooms.clear)
    thread.start()
    thread.join()
    again = [memory.room(100, kinds(WIDTH)) for _ in range(8)]
    assert {address(room) for room in again} == known


def test_a_block_is_not_wasted_on_far_fewer_rows() -> None:
    memory = Memory()
    where = address(memory.room(1000, kinds(WIDTH)))
    assert address(memory.room(100, kinds(WIDTH))) != where
    assert address(memory.room(600, kinds(WIDTH))) == where


def test_it_stays_as_large_as_what_was_held_at_once() -> None:
    memory = Memory()
    for rows in [700, 512, 900, 650, 1000] * 40:
        held = [memory.room(rows, kinds(WIDTH)) for _ in range(3)]
        del held
    assert memory._made <= 12


def test_what_is_kept_for_later_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory()
    held = [memory.room(100, kinds(WIDTH)) for _ in range(6)]
    size = len(held[0].block.mapping)  # type: ignore[union-attr]
    monkeypatch.setattr(module, "_FREE_BYTES", 2 * size)
    held.clear()
    gc.collect()
    room = memory.room(100, kinds(WIDTH))
    assert sum(len(block.mapping) for block in memory._free) == size
    memory.close()
    assert memory._free == []
    assert room.tensors[1].fill_(3).unique().tolist() == [3], "what is held outlives it"


def test_a_kernel_without_huge_pages_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 10**6, raising=False)  # EINVAL, as there
    room = Memory().room(100, kinds(WIDTH))
    assert room.block is not None
    assert room.tensors[1].fill_(2).unique().tolist() == [2]
