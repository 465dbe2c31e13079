"""The rows of one request, from its first pass until they are collected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_compat._capture.memory import Memory, Room
from vllm_compat._capture.slots import ROWS, OneByOne, Slot, Slots

__all__ = ["KeptRows"]


class KeptRows:
    """Rows of a request, told of when they are forwarded (``expect``) and copied in later (``write``).

    They are copies, in memory of the request's own: else one short request would keep a whole batch.

    Args:
        num_tokens: rows to make room for at first; 0 where that is not known.
        memory: where the room comes from.
        slots: where that of an answer comes from.
    """

    def __init__(self, num_tokens: int = 0, memory: Memory | None = None, slots: Slots | None = None) -> None:
        self._num_tokens = num_tokens
        self._memory = memory or Memory()
        self._slots = slots or Slots(self._memory)
        self._rooms: list[Room | Slot] = []
        self._room = 0  # rows that there is room for
        self._length = 0

    def __len__(self) -> int:
        """Rows so far, also those that are still to be written."""
        return self._length

    def expect(self, start: int, count: int) -> bool:
        """``count`` rows from position ``start`` on will be written; False when there is a gap before them.

        A request that was preempted starts over: its new rows replace the old ones from there on.
        """
        if start > self._length:
            return False
        self._length = start + count
        return True

    def skip(self, count: int) -> None:
        """The first ``count`` rows are not forwarded: they will be written out of another request's."""
        self._length = count

    def first(self, count: int) -> list[Any]:
        """Copies of the first ``count`` rows, which have been written; one tensor of each kind."""
        return self._copied(count).tensors

    def write(self, start: int, tensors: Sequence[Any]) -> None:
        """Copy rows in, in the order of ``expect``.

        Args:
            start: the position of the first.
            tensors: each [rows, ...]; of the same kinds every time.
        """
        import torch

        end, first = start + len(tensors[0]), 0
        with torch.inference_mode(False):
            for room in self._rooms_to(end, tensors):
                at, to = max(start, first), min(end, first + len(room.tensors[0]))
                if at < to:
                    for target, source in zip(room.tensors, tensors, strict=True):
                        target[at - first : to - first].copy_(source[at - start : to - start])
                first += len(room.tensors[0])

    def write_later(self, start: int, source: int, like: Sequence[Any], later: OneByOne) -> bool:
        """Let one row be copied in with those of other requests; False where it must be written by itself.

        Args:
            start: its position.
            source: its row in the pass.
            like: the tensors of the pass.
            later: does it.
        """
        self._rooms_to(start + 1, like)
        last = self._rooms[-1]
        row = start - (self._room - ROWS)
        if not isinstance(last, Slot) or row < 0:  # it goes on from before an answer's last piece
            return False
        later.add(last, row, source)
        return True

    def joined(self) -> Room:
        """All rows, one tensor of each kind."""
        first = self._rooms[0]
        if len(self._rooms) == 1 and isinstance(first, Room) and len(first.tensors[0]) == self._length:
            return first
        return self._copied(self._length)

    def _copied(self, count: int) -> Room:
        import torch

        copy, begin = self._memory.room(count, self._rooms[0].tensors), 0
        with torch.inference_mode(False):
            for room in self._rooms:
                end = min(begin + len(room.tensors[0]), count)
                if begin < end:
                    for target, source in zip(copy.tensors, room.tensors, strict=True):
                        target[begin:end].copy_(source[: end - begin])
                begin = end
        return copy

    def _rooms_to(self, end: int, like: Sequence[Any]) -> list[Room | Slot]:
        missing = end - self._room
        if missing > 0:
            rows = max(missing, self._num_tokens if not self._rooms else ROWS)
            if self._rooms and rows == ROWS:
                self._rooms.append(self._slots.slot(like))
            else:
                self._rooms.append(self._memory.room(rows, like))
            self._room += rows
        return self._rooms
