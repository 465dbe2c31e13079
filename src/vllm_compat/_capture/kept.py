"""The rows of one request, from its first pass until they are collected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["KeptRows"]

_ROWS_OF_AN_ANSWER = 64  # come one by one; memory is taken for as many at a time


class KeptRows:
    """Rows of a request, told of when they are forwarded (``expect``) and copied in later (``write``).

    They are copies, in memory of the request's own: else one short request would keep a whole batch. And they are
    ordinary tensors, not inference tensors, or no trainer could use them.

    Args:
        num_tokens: rows to make room for at first; 0 where that is not known.
    """

    def __init__(self, num_tokens: int = 0) -> None:
        self._num_tokens = num_tokens
        self._blocks: list[list[Any]] = []
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
        """The first ``count`` rows, which have been written; one tensor of each kind."""
        import torch

        parts, left = [], count
        for block in self._blocks:
            parts.append([tensor[: max(left, 0)] for tensor in block])
            left -= len(block[0])
        with torch.inference_mode(False):
            return [torch.cat(kind) for kind in zip(*parts, strict=True)]

    def write(self, start: int, tensors: Sequence[Any]) -> None:
        """Copy rows in, in the order of ``expect``.

        Args:
            start: the position of the first.
            tensors: each [rows, ...]; of the same kinds every time.
        """
        import torch

        end, first = start + len(tensors[0]), 0
        with torch.inference_mode(False):
            for block in self._blocks_to(end, tensors):
                at, to = max(start, first), min(end, first + len(block[0]))
                if at < to:
                    for target, source in zip(block, tensors, strict=True):
                        target[at - first : to - first].copy_(source[at - start : to - start])
                first += len(block[0])

    def joined(self) -> list[Any]:
        """All rows, one tensor of each kind."""
        if len(self._blocks) == 1 and len(self._blocks[0][0]) == self._length:
            return self._blocks[0]
        return self.first(self._length)

    def _blocks_to(self, end: int, like: Sequence[Any]) -> list[list[Any]]:
        import torch

        missing = end - sum(len(block[0]) for block in self._blocks)
        if missing > 0:
            rows = max(missing, _ROWS_OF_AN_ANSWER if self._blocks else self._num_tokens)
            self._blocks.append([torch.empty((rows, *t.shape[1:]), dtype=t.dtype) for t in like])
        return self._blocks
