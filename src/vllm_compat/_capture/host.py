"""The tensors of a pass, from the device to the host's memory.

One copy is under way at a time: ``send`` says what to copy when a pass is queued, ``finish`` ends it before the next
``send``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

__all__ = ["Device", "HostCopy", "InPlace", "SideStream", "host_copy", "planes"]

_SHORT_BYTES = 1 << 20
"""Are copied in the time that one more copy takes to begin, 20 microseconds."""


class HostCopy(ABC):
    """A way to the host's memory."""

    late: ClassVar[bool]
    """Whether ``finish`` is best called while the device runs the next pass; else right after ``send``."""

    @abstractmethod
    def send(self, tensors: Sequence[Any], ranges: Sequence[tuple[int, int]]) -> None:
        """Have some rows, in order from one to before another, of tensors [rows] and [rows, planes, ...] copied, which
        the device may still have to write."""

    @abstractmethod
    def before_write(self) -> None:
        """Called once in a pass, where the device has been given work and next the tensors that were sent to write
        again."""

    @abstractmethod
    def finish(self) -> Sequence[Any]:
        """The tensors in the host's memory, good until the next ``before_write``; in other rows there is anything.
        Waits for the copy."""


class InPlace(HostCopy):
    """The device is the host: nothing to copy."""

    late = False

    def __init__(self) -> None:
        self._tensors: Sequence[Any] = ()

    def send(self, tensors: Sequence[Any], ranges: Sequence[tuple[int, int]]) -> None:
        self._tensors = tensors

    def before_write(self) -> None:
        return

    def finish(self) -> Sequence[Any]:
        return self._tensors


class SideStream(HostCopy):
    """A copy beside the device's work, into pinned memory: neither the device nor the host waits for it.

    It begins in the next pass, once the device has work there, or when it is waited for. A device copies to the host in
    one queue, and the sampled tokens, for which the whole step waits, would stand in it behind the states (5 ms of a
    step of 196: 8B, four layers, one H200); and to begin it takes the host half a millisecond, for which between two
    passes the device would stand still.

    One set of pinned buffers, as large as the largest pass so far, will do: by the time the next copy starts, the rows
    were taken out.
    """

    late = True

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = device.stream()
        self._written, self._copied = device.event(), device.event()
        self._pinned: dict[Any, Any] = {}
        self._tensors: list[Any] = []
        self._due: tuple[Sequence[Any], Sequence[tuple[int, int]]] | None = None

    def send(self, tensors: Sequence[Any], ranges: Sequence[tuple[int, int]]) -> None:
        self._written.record(self._device.current_stream())
        self._due = tensors, ranges

    def before_write(self) -> None:
        self._start()
        # The wait is the device's. It also makes it safe to free the tensors that were copied: whatever the allocator
        # puts in their place is written by the same stream, thus later.
        self._device.current_stream().wait_event(self._copied)

    def finish(self) -> Sequence[Any]:
        self._start()
        self._copied.synchronize()
        return self._tensors

    def _start(self) -> None:
        if self._due is None:
            return
        (tensors, ranges), self._due = self._due, None
        self._stream.wait_event(self._written)
        self._tensors = [self._room(n, tensor) for n, tensor in enumerate(tensors)]
        pairs = [
            pair
            for target, source in zip(self._tensors, tensors, strict=True)
            for begin, end in _joined(ranges, source)
            for pair in zip(_each_plane(target[begin:end]), _each_plane(source[begin:end]), strict=True)
        ]
        self._device.copy(self._stream, pairs)
        self._copied.record(self._stream)

    def _room(self, number: int, tensor: Any) -> Any:
        kind = (number, tensor.dtype, tensor.shape[1:])
        if kind not in self._pinned or len(self._pinned[kind]) < len(tensor):
            self._pinned.pop(kind, None)
            self._pinned[kind] = self._device.pinned(tensor)
        return self._pinned[kind][: len(tensor)]


def planes(rows: int, *dimensions: int, **options: Any) -> Any:
    """A new tensor [rows], or [rows, planes, ...] of which each plane [rows, ...] is contiguous: to write one takes the
    device half as long as where the planes of a row lie side by side.

    Args:
        rows: how many.
        dimensions: those after it.
        options: of ``torch.empty``.
    """
    import torch

    if not dimensions:
        return torch.empty(rows, **options)
    return torch.empty((dimensions[0], rows, *dimensions[1:]), **options).transpose(0, 1)


def _each_plane(tensor: Any) -> Sequence[Any]:
    return [tensor] if tensor.dim() == 1 else tensor.unbind(1)


def _joined(ranges: Sequence[tuple[int, int]], tensor: Any) -> list[tuple[int, int]]:
    """The ranges of rows, those joined that have little between them: of each copied plane less than a short copy."""
    row = _each_plane(tensor[:1])[0]
    hole = _SHORT_BYTES // (row.numel() * row.element_size())
    joined: list[tuple[int, int]] = []
    for begin, end in ranges:
        if joined and begin - joined[-1][1] <= hole:
            begin = joined.pop()[0]
        joined.append((begin, end))
    return joined


class Device:
    """All that a side stream asks of torch, for any device that has streams."""

    def __init__(self, device: Any) -> None:
        import torch

        self._device = device
        self._module: Any = torch.get_device_module(device)

    def stream(self) -> Any:
        return self._module.Stream(self._device)

    def current_stream(self) -> Any:
        return self._module.current_stream(self._device)

    def event(self) -> Any:
        return self._module.Event()

    def pinned(self, tensor: Any) -> Any:
        """Pinned memory for a copy of ``tensor``."""
        import torch

        with torch.inference_mode(False):
            return planes(*tensor.shape, dtype=tensor.dtype, pin_memory=True)

    def copy(self, stream: Any, pairs: Sequence[tuple[Any, Any]]) -> None:
        """Queue copies on ``stream``, each to a tensor of pinned memory from one of the device's."""
        with self._module.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)


def host_copy(device: Any) -> HostCopy:
    """The way from a torch device."""
    return InPlace() if device.type == "cpu" else SideStream(Device(device))
