"""Room for the rows of answers, which come one by one, for all requests at once: they are copied in all at once, too.

Row by row it would take longer than a step: with 256 requests 13 ms, of which the bytes themselves are 2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from vllm_compat._capture.memory import Memory

__all__ = ["ROWS", "OneByOne", "Slot", "Slots"]

ROWS = 64
"""Of a slot."""
_SLOTS = 16
"""Of a slab, which is one piece of memory."""


class _Slab:
    """Tensors [slots, rows of each, ...]."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        self.tensors = tensors
        self.free = list(range(_SLOTS))


class Slot:
    """Room for 64 rows of one request. It comes back by itself when it is dropped, and then its views are void."""

    __slots__ = ("_returned", "index", "slab", "tensors")

    def __init__(self, slab: _Slab, index: int, returned: deque[tuple[_Slab, int]]) -> None:
        self.slab = slab
        self.index = index
        self.tensors = [tensor[index] for tensor in slab.tensors]
        self._returned = returned

    def __del__(self) -> None:
        self._returned.append((self.slab, self.index))


class Slots:
    """The slots of one worker."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._slabs: list[_Slab] = []
        self._kinds: object = None
        self._returned: deque[tuple[_Slab, int]] = deque()

    def slot(self, like: Sequence[Any]) -> Slot:
        """One more.

        Args:
            like: of each kind a tensor [any rows, ...].
        """
        self._collect()
        kinds = [(tensor.dtype, tensor.shape[1:]) for tensor in like]
        if kinds != self._kinds:
            self._kinds, self._slabs = kinds, []
        with_room = [slab for slab in self._slabs if slab.free]
        if not with_room:
            room = self._memory.room(_SLOTS * ROWS, like)
            with_room = [_Slab([tensor.view(_SLOTS, ROWS, *tensor.shape[1:]) for tensor in room.tensors])]
            self._slabs += with_room
        slab = min(with_room, key=lambda slab: len(slab.free))  # so that others become free as a whole
        return Slot(slab, slab.free.pop(), self._returned)

    def _collect(self) -> None:
        while self._returned:
            slab, index = self._returned.popleft()
            slab.free.append(index)
        spare = [slab for slab in self._slabs if len(slab.free) == _SLOTS]
        for slab in spare[1:]:
            self._slabs.remove(slab)


class OneByOne:
    """Single rows of a pass, and the slots they go to."""

    def __init__(self) -> None:
        self._of: dict[_Slab, list[tuple[int, int, int]]] = {}

    def add(self, slot: Slot, row: int, source: int) -> None:
        """Row ``source`` of the pass belongs at ``row`` of the slot."""
        self._of.setdefault(slot.slab, []).append((slot.index, row, source))

    def copy(self, tensors: Sequence[Any]) -> None:
        """Copy all of them in.

        Args:
            tensors: of the pass, each [rows, ...].
        """
        import torch

        with torch.inference_mode(False):
            for slab, places in self._of.items():
                slots, rows, sources = (torch.tensor(part) for part in zip(*places, strict=True))
                for target, source in zip(slab.tensors, tensors, strict=True):
                    target[slots, rows] = source[sources]
