"""The rows of one request, from its first pass until they are collected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_compat._capture.memory import Memory, Room

__all__ = ["KeptRows"]

_ROWS_OF_AN_ANSWER = 64  # come one by one; memory is taken for as many at a time


class KeptRows:
    """Rows of a request, told of when they are forwarded (``expect``) and copied in later (``write``).

    They are copies, in memory of the request's own: else one short request would keep a whole batch.

    Args:
        num_tokens: rows to make room for at first; 0 where that is not known.
        memory: where the room comes from.
    """

    def __init__(self, num_tokens: int = 0, memory: Memory | None = None) -> None:
        self._num_tokens = num_tokens
        self._memory = memory or Memory()
        self._rooms: list[Room] = []
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

    def joined(self) -> Room:
        """All rows, one tensor of each kind."""
        if len(self._rooms) == 1 and len(self._rooms[0].tensors[0]) == self._length:
            return self._rooms[0]
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

    def _rooms_to(self, end: int, like: Sequence[Any]) -> list[Room]:
        missing = end - sum(len(room.tensors[0]) for room in self._rooms)
        if missing > 0:
            rows = max(missing, _ROWS_OF_AN_ANSWER if self._rooms else self._num_tokens)
            self._rooms.append(self._memory.room(rows, like))
        return self._rooms
