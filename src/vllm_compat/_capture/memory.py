"""Memory for the rows of requests, used again once nobody holds them. Runs in the worker.

Memory fresh from the system is slow: each page is made, cleared and mapped at its first touch, and taken away at the
end. At a gigabyte a second that takes longer than the copies into it, and the end falls where the device waits.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Block", "Memory", "Room"]

LEAST = 1 << 17
"""Bytes from which on rows get a block; for fewer ordinary memory is as good."""
_FREE_BYTES = 2 << 30  # kept for later, at most
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A piece of memory.

    Attributes:
        mapping: its bytes.
        number: no other block of this worker has it.
        descriptor: of the file that another process can map, or -1.
    """

    mapping: mmap.mmap
    number: int
    descriptor: int = -1


@dataclass(frozen=True, slots=True)
class Room:
    """Tensors of equally many rows.

    Attributes:
        tensors: each [rows, ...], not initialized.
        block: that has them one after the other, see ``offsets``; None in ordinary memory.
    """

    tensors: list[Any]
    block: Block | None = None


class Memory:
    """Gives out room for rows; what is no longer held comes back by itself, from whichever thread dropped it."""

    def __init__(self) -> None:
        self._free: list[Block] = []
        self._returned: deque[Block] = deque()  # a finalizer may run anywhere, even in here: it takes no lock
        self._made = 0

    def room(self, rows: int, like: Sequence[Any]) -> Room:
        """Ordinary tensors, not inference tensors, or no trainer could use them.

        Args:
            rows: at least 1.
            like: of each kind a tensor [any rows, ...].
        """
        import torch

        kinds = [(tensor.dtype, (rows, *tensor.shape[1:])) for tensor in like]
        places, size = offsets(kinds)
        with torch.inference_mode(False):
            if size < LEAST or (block := self._take(size)) is None:
                return Room([torch.empty(shape, dtype=dtype) for dtype, shape in kinds])
            view = memoryview(block.mapping)
            weakref.finalize(view, self._returned.append, block).atexit = False
            return Room(tensors_in(view, kinds, places), block)

    def close(self) -> None:
        """Forget what nobody holds."""
        self._collect()
        while self._free:
            self._drop(self._free.pop())

    def _take(self, size: int) -> Block | None:
        """A block of at least ``size`` bytes, and of at most twice as many."""
        self._collect()
        most = 2 * _rounded(size)
        fitting = [block for block in self._free if size <= len(block.mapping) <= most]
        if fitting:
            block = min(fitting, key=lambda block: len(block.mapping))
            self._free.remove(block)
            return block
        self._made += 1
        return self._make(_rounded(size), self._made)

    def _make(self, size: int, number: int) -> Block | None:
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a wish: not every kernel has such pages
                mapping.madvise(mmap.MADV_HUGEPAGE)
        return Block(mapping, number)

    def _drop(self, block: Block) -> None:
        """Nobody wants it any more; its memory goes with the object."""

    def _collect(self) -> None:
        while self._returned:
            self._free.append(self._returned.popleft())
        while sum(len(block.mapping) for block in self._free) > _FREE_BYTES:
            self._drop(self._free.pop(0))


def offsets(kinds: Sequence[tuple[Any, tuple[int, ...]]]) -> tuple[list[int], int]:
    """Where each tensor (dtype, shape) begins in a block, and how long they are together, in bytes."""
    places, end = [], 0
    for dtype, shape in kinds:
        places.append(end)
        end += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return places, end


def tensors_in(view: memoryview, kinds: Sequence[tuple[Any, tuple[int, ...]]], places: Sequence[int]) -> list[Any]:
    """Tensors over the bytes of ``view``, which they keep alive."""
    import torch

    return [
        torch.frombuffer(view, dtype=dtype, count=math.prod(shape), offset=place).view(shape)
        for (dtype, shape), place in zip(kinds, places, strict=True)
    ]


def _rounded(size: int) -> int:
    """Up by an eighth at most, so that samples of about the same length find each other's blocks."""
    step = max(mmap.PAGESIZE, 1 << (size.bit_length() - 4))
    return -(-size // step) * step
