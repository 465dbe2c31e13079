"""Rows that the engine's process reads where a worker's process wrote them: nothing large goes through a reply.

The memory is a file without a name, which the system frees once neither process has it any more, whichever way they
end; no mount and no limit of ``/dev/shm`` has a part in it. The worker keeps a block until it is told that nobody over
there holds its rows, and then writes the next ones into it.
"""

from __future__ import annotations

import mmap
import os
import secrets
import weakref
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from vllm_compat._capture.memory import Block, Memory, Room, offsets, tensors_in

__all__ = ["Borrower", "LendingMemory", "Lent"]

Kinds: TypeAlias = Sequence[tuple[Any, tuple[int, ...]]]
"""Of each tensor its dtype and its shape."""

_NAME = "vllm-compat-rows"
_MOST_BLOCKS = 64
"""Of one worker: each is two open files there and one here, of 1,024 that a process may usually have."""


@dataclass(frozen=True, slots=True)
class Lent:
    """What a reply says of rows: where they are.

    Attributes:
        worker: who lends them.
        number: of the block.
        process: that has the file open.
        descriptor: under which.
        kinds: of the tensors in it.
    """

    worker: str
    number: int
    process: int
    descriptor: int
    kinds: Kinds


class LendingMemory(Memory):
    """A worker's memory that the engine's process can map.

    Attributes:
        worker: the name of this worker, which no other has.
    """

    def __init__(self) -> None:
        super().__init__()
        self.worker = secrets.token_hex(8)
        self._lent: dict[int, Room] = {}
        self._gone: list[int] = []
        self._blocks = 0
        self._probe = self._make(mmap.PAGESIZE, 0)
        if self._probe:
            self._probe.mapping[: len(self.worker)] = self.worker.encode()

    def probe(self) -> Lent | None:
        """Bytes to find out whether the engine's process can read what is lent: the name of this worker."""
        return Lent(self.worker, 0, os.getpid(), self._probe.descriptor, ()) if self._probe else None

    def lend(self, room: Room) -> Lent | None:
        """Keep the rows for the other process until they are ``returned``; None where they are in ordinary memory."""
        block = room.block
        if block is None:
            return None
        self._lent[block.number] = room
        kinds = [(tensor.dtype, tuple(tensor.shape)) for tensor in room.tensors]
        return Lent(self.worker, block.number, os.getpid(), block.descriptor, kinds)

    def returned(self, numbers: Sequence[int]) -> None:
        """Nobody over there holds these blocks' rows any more."""
        for number in numbers:
            self._lent.pop(number, None)

    def gone(self) -> list[int]:
        """Blocks that will not be used again, since the last call."""
        gone, self._gone = self._gone, []
        return gone

    def close(self) -> None:
        """Take back what is lent: the other process has mapped it already, or never will."""
        self._lent.clear()
        super().close()
        if self._probe:
            self._drop(self._probe)
            self._probe = None

    def _make(self, size: int, number: int) -> Block | None:
        if self._blocks >= _MOST_BLOCKS and self._free:
            self._drop(self._free.pop(0))
        if self._blocks >= _MOST_BLOCKS:
            return None
        descriptor = -1
        try:
            descriptor = os.memfd_create(_NAME)
            os.ftruncate(descriptor, size)
            mapping = mmap.mmap(descriptor, size)
        except OSError:  # no more files, or no memory: these rows go the ordinary way
            if descriptor >= 0:
                os.close(descriptor)
            return None
        self._blocks += 1
        return Block(mapping, number, descriptor)

    def _drop(self, block: Block) -> None:
        self._blocks -= 1
        self._gone.append(block.number)
        os.close(block.descriptor)


class Borrower:
    """The engine's side. A worker's blocks stay mapped here as long as it may use them again."""

    def __init__(self) -> None:
        self._mappings: dict[tuple[str, int], mmap.mmap] = {}
        self._returned: deque[tuple[str, int]] = deque()  # finalizers append from any thread

    def reaches(self, probe: Lent | None) -> bool:
        """Whether what this worker lends can be read here: it is on this machine, and may be looked into."""
        if probe is None:
            return False
        try:
            with _open(probe) as mapping:
                return mapping[: len(probe.worker)] == probe.worker.encode()
        except (OSError, ValueError):
            return False

    def tensors(self, lent: Lent) -> list[Any]:
        """The rows, in place: they are the worker's again once the last of these tensors is gone.

        Raises:
            OSError: the worker is gone.
        """
        key = (lent.worker, lent.number)
        if key not in self._mappings:
            self._mappings[key] = _open(lent)
        import torch

        view = memoryview(self._mappings[key])
        weakref.finalize(view, self._returned.append, key).atexit = False
        with torch.inference_mode(False):
            return tensors_in(view, lent.kinds, offsets(lent.kinds)[0])

    def returned(self) -> Mapping[str, list[int]]:
        """For each worker the blocks that nobody holds any more since the last call."""
        numbers: defaultdict[str, list[int]] = defaultdict(list)
        for _ in range(len(self._returned)):
            worker, number = self._returned.popleft()
            numbers[worker].append(number)
        return dict(numbers)

    def forget(self, worker: str, numbers: Sequence[int]) -> None:
        """Blocks that their worker will not use again."""
        for number in numbers:
            self._mappings.pop((worker, number), None)


def _open(lent: Lent) -> mmap.mmap:
    path = f"/proc/{lent.process}/fd/{lent.descriptor}"
    if _NAME not in (found := os.readlink(path)):  # noqa: PTH115 - on another machine this may be anybody's, a device too
        raise FileNotFoundError(f"{path} is {found}, not rows that were lent")
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)
