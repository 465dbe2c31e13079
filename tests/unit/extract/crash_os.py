"""A file system in memory that notes what was done to it, and every state that a crash may legally leave.

What was not synced may be there, be there in part, or be zeros; a name that was not synced may be there or not, each on
its own. Only what was synced is sure. One folder, as one shard has it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["BUGS", "CrashOs", "Done", "State", "crash_states"]


class Done(NamedTuple):
    """A promise in the trace: from here on this sample may not be lost."""

    sample: int


class _Made(NamedTuple):
    name: str
    node: int


class _Renamed(NamedTuple):
    old: str
    new: str
    node: int


class _Written(NamedTuple):
    node: int
    data: bytes


class _Synced(NamedTuple):
    node: int


class _FolderSynced(NamedTuple):
    pass


_NameOperation = _Made | _Renamed
Operation = _NameOperation | _Written | _Synced | _FolderSynced | Done


class CrashOs:
    """``os`` for the module that writes.

    Attributes:
        trace: what was done, in order.
    """

    def __init__(self, folder: Path) -> None:
        self.trace: list[Operation] = []
        self._folder = str(folder)
        self._open: dict[int, int | None] = {}
        self._nodes: dict[str, int] = {}
        self._numbers = itertools.count(1000)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("O_"):
            return getattr(os, name)
        raise AssertionError(f"os.{name} is not in the model")

    def open(self, path: Path, _flags: int, _mode: int = 0) -> int:
        descriptor = next(self._numbers)
        if str(path) == self._folder:
            self._open[descriptor] = None
        else:
            self._open[descriptor] = self._nodes[path.name] = descriptor
            self.trace.append(_Made(path.name, descriptor))
        return descriptor

    def write(self, descriptor: int, data: memoryview) -> int:
        node = self._open[descriptor]
        assert node is not None
        self.trace.append(_Written(node, bytes(data)))
        return len(data)

    def fsync(self, descriptor: int) -> None:
        node = self._open[descriptor]
        self.trace.append(_FolderSynced() if node is None else _Synced(node))

    def replace(self, old: Path, new: Path) -> None:
        self._nodes[new.name] = self._nodes.pop(old.name)
        self.trace.append(_Renamed(old.name, new.name, self._nodes[new.name]))

    def ftruncate(self, _descriptor: int, length: int) -> None:
        assert length == 0, "a journal that begins"

    def close(self, descriptor: int) -> None:
        del self._open[descriptor]

    def without_file_syncs(self, journal: str) -> list[Operation]:
        """The trace of a program that forgets to sync its files."""
        return [o for o in self.trace if not isinstance(o, _Synced) or o.node == self._nodes[journal]]

    def without_journal_syncs(self, journal: str) -> list[Operation]:
        """The trace of a program that forgets to sync its journal."""
        return [o for o in self.trace if not isinstance(o, _Synced) or o.node != self._nodes[journal]]

    def without_folder_syncs(self, _journal: str) -> list[Operation]:
        """The trace of a program that forgets to sync its folder."""
        return [o for o in self.trace if not isinstance(o, _FolderSynced)]

    def journal_first(self, journal: str) -> list[Operation]:
        """The trace of a program that writes a sample's line before its file; for one thread."""
        found: list[Operation] = []
        lines: list[Operation] = []
        for operation in reversed(self.trace):
            of_journal = isinstance(operation, (_Written, _Synced)) and operation.node == self._nodes[journal]
            (lines if of_journal else found).append(operation)
            if isinstance(operation, _Made):
                found += lines
                lines = []
        return found[::-1]


BUGS: tuple[Callable[[CrashOs, str], list[Operation]], ...] = (
    CrashOs.without_file_syncs,
    CrashOs.without_journal_syncs,
    CrashOs.without_folder_syncs,
    CrashOs.journal_first,
)
"""Traces of wrong programs, each of which a test of crash states has to notice."""


@dataclass(frozen=True)
class State:
    """What a crash leaves: name -> content; and the samples that were promised before it."""

    files: dict[str, bytes]
    promised: frozenset[int]


@dataclass(frozen=True)
class _Disk:
    sure: dict[int, bytes] = field(default_factory=dict[int, bytes])
    unsure: dict[int, bytes] = field(default_factory=dict[int, bytes])
    names: dict[str, int] = field(default_factory=dict[str, int])
    name_operations: tuple[_NameOperation, ...] = ()
    promised: frozenset[int] = frozenset()

    def after(self, operation: Operation) -> _Disk:
        match operation:
            case _Written(node, data):
                return replace(self, unsure=self.unsure | {node: self.unsure.get(node, b"") + data})
            case _Synced(node):
                whole = self.sure.get(node, b"") + self.unsure.get(node, b"")
                left = {other: data for other, data in self.unsure.items() if other != node}
                return replace(self, sure=self.sure | {node: whole}, unsure=left)
            case _FolderSynced():
                return replace(self, names=_applied(self.names, self.name_operations), name_operations=())
            case Done(sample):
                return replace(self, promised=self.promised | {sample})
            case _:
                return replace(self, name_operations=(*self.name_operations, operation))

    def states(self, every_byte_of: str) -> Iterator[State]:
        for size in range(len(self.name_operations) + 1):
            for kept in itertools.combinations(self.name_operations, size):
                names = _applied(self.names, kept)
                choices = [self._contents(node, every_byte=name == every_byte_of) for name, node in names.items()]
                for contents in itertools.product(*choices):
                    yield State(dict(zip(names, contents, strict=True)), self.promised)

    def _contents(self, node: int, *, every_byte: bool) -> list[bytes]:
        sure, more = self.sure.get(node, b""), self.unsure.get(node, b"")
        if not more:
            return [sure]
        cuts: Iterable[int] = range(len(more) + 1) if every_byte else {0, 1, len(more) // 2, len(more) - 1, len(more)}
        torn = [sure + more[:cut] for cut in cuts]
        zeros = [sure + more[:cut] + bytes(len(more) - cut) for cut in (0, len(more) // 2)]
        return [*torn, *zeros]


def crash_states(trace: Iterable[Operation], every_byte_of: str) -> Iterator[State]:
    """Every state that a crash may leave, after each operation of a trace.

    Args:
        trace: of a ``CrashOs``.
        every_byte_of: the file that may be torn at any of its bytes; others are torn at five places.
    """
    disk = _Disk()
    for operation in trace:
        disk = disk.after(operation)
        yield from disk.states(every_byte_of)


def _applied(names: dict[str, int], operations: Iterable[_NameOperation]) -> dict[str, int]:
    found = dict(names)
    for operation in operations:
        match operation:
            case _Made(name, node):
                found[name] = node
            case _Renamed(old, new, node):
                found.pop(old, None)
                found[new] = node
    return found
