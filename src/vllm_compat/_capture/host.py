"""The tensors of a pass, from the device to the host's memory.

One copy is under way at a time: ``start`` it when a pass is queued, ``finish`` it before the next ``start``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

__all__ = ["Device", "HostCopy", "InPlace", "SideStream", "host_copy"]


class HostCopy(ABC):
    """A way to the host's memory."""

    late: ClassVar[bool]
    """Whether ``finish`` is best called while the device runs the next pass; else right after ``start``."""

    @abstractmethod
    def before_write(self) -> None:
        """Called once in a pass, where the device is about to write the tensors of the last ``start`` again."""

    @abstractmethod
    def start(self, tensors: Sequence[Any], ranges: Sequence[tuple[int, int]]) -> None:
        """Begin to copy some rows, from one to before another, of tensors [rows, ...] that the device may still have
        to write."""

    @abstractmethod
    def finish(self) -> Sequence[Any]:
        """The tensors in the host's memory, good until the next ``start``; in other rows there is anything. Waits for
        the copy."""


class InPlace(HostCopy):
    """The device is the host: nothing to copy."""

    late = False

    def __init__(self) -> None:
        self._tensors: Sequence[Any] = ()

    def before_write(self) -> None:
        return

    def start(self, tensors: Sequence[Any], ranges: Sequence[tuple[int, int]]) -> None:
        self._tensors = tensors

    def finish(self) -> Sequence[Any]:
        return self._tensors


class SideStream(HostCopy):
    """A copy beside the device's work, into pinned memory: neither the device nor the host waits for it.

    One set of pinned buffers, as large as the largest pass so far, will do: by the time the next copy starts, the next
    pass has been queued, and the rows were taken out meanwhile.
    """

    late = True

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = device.stream()
        self._written, self._copied = device.event(), device.event()
        self._pinned: dict[Any, Any] = {}
        self._tensors: list[Any] = []

    def before_write(self) -> None:
        # The wait is the device's. It also makes it safe to free the tensors that were copied: whatever the allocator
        # puts in their place is written by the same stream, thus later.
        self._device.current_stream().wait_event(self._copied)

    def start(self, tensors: Sequence[Any], ranges: Sequence[tuple[int, int]]) -> None:
        self._written.record(self._device.current_stream())
        self._stream.wait_event(self._written)
        self._tensors = [self._room(n, tensor) for n, tensor in enumerate(tensors)]
        for target, source in zip(self._tensors, tensors, strict=True):
            for begin, end in ranges:
                self._device.copy(self._stream, target[begin:end], source[begin:end])
        self._copied.record(self._stream)

    def finish(self) -> Sequence[Any]:
        self._copied.synchronize()
        return self._tensors

    def _room(self, number: int, tensor: Any) -> Any:
        kind = (number, tensor.dtype, tensor.shape[1:])
        if kind not in self._pinned or len(self._pinned[kind]) < len(tensor):
            self._pinned.pop(kind, None)
            self._pinned[kind] = self._device.pinned(tensor)
        return self._pinned[kind][: len(tensor)]


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
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

    def copy(self, stream: Any, target: Any, source: Any) -> None:
        """Queue a copy on ``stream``."""
        with self._module.stream(stream):
            target.copy_(source, non_blocking=True)


def host_copy(device: Any) -> HostCopy:
    """The way from a torch device."""
    return InPlace() if device.type == "cpu" else SideStream(Device(device))
