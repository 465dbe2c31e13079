"""The states of one forward pass, from the layers to the host's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from vllm_compat._capture.host import HostCopy, InPlace, host_copy, planes

__all__ = ["Kind", "Stack"]

Kind: TypeAlias = tuple[Any, ...]
"""What a row is: its dtype and its dimensions."""


class Stack:
    """[tokens, layers, hidden_size], written by the layers themselves; its memory is kept from pass to pass.

    It grows to the largest pass so far. Where layers' states differ in dtype or width there is a stack for each, with
    a place for every layer: such models are rare, and pay in memory alone.

    A pass goes: ``begin``, a ``write`` of each layer, ``send``; then, before the next ``send``, ``fetch``.
    """

    def __init__(self, num_layers: int) -> None:
        self.received: list[list[int]] = [[] for _ in range(num_layers)]
        """For each layer the rows of every state that came in this pass."""
        self.kinds: list[Kind] = [()] * num_layers
        """For each layer the rows of the stack that has its state."""
        self._total = 0
        self._device: Any = None
        self._copy: HostCopy = InPlace()
        self._buffers: dict[Kind, Any] = {}

    @property
    def late(self) -> bool:
        """Whether ``fetch`` is best called while the device runs the next pass; else right after ``send``."""
        return self._copy.late

    def begin(self, total: int) -> None:
        """A pass of ``total`` tokens; what a state has after as many rows is padding."""
        self._total = total
        for rows in self.received:
            rows.clear()

    def write(self, place: int, parts: Sequence[Any]) -> None:
        """Keep a layer's state: a tensor [rows, hidden_size], or two of them to add.

        One of too few rows is counted and not kept.
        """
        import torch

        rows, width = parts[0].shape
        if self._device is None:
            self._device = parts[0].device
            self._copy = host_copy(self._device)
        if not any(self.received):  # not in begin: the last pass is copied beside the layers before this one
            self._copy.before_write()
        self.received[place].append(rows)
        if rows < self._total:
            return
        dtype = parts[0].dtype if len(parts) == 1 else torch.promote_types(parts[0].dtype, parts[1].dtype)
        self.kinds[place] = (dtype, len(self.received), width)
        state = self._room(self.kinds[place])[:, place]
        if len(parts) == 1:
            state.copy_(parts[0][: self._total])
        else:
            torch.add(parts[0][: self._total], parts[1][: self._total], out=state)

    def send(self, token_ids: Any, ranges: Sequence[tuple[int, int]]) -> None:
        """Have rows of the pass copied to the host, once every layer has written.

        Args:
            token_ids: those of the pass, then padding. The runner may write over them afterwards.
            ranges: which rows, each from one to before another.
        """
        ids = self._room((token_ids.dtype,))
        ids.copy_(token_ids[: self._total])
        self._copy.send([ids, *map(self._room, dict.fromkeys(self.kinds))], ranges)

    def fetch(self) -> Sequence[Any]:
        """The pass last sent, as tensors [tokens, ...]: its token ids, then a stack for each of ``kinds``. Of rows that
        were not asked for there may be anything.

        Waits for the copy. They are good until the next ``write``.
        """
        return self._copy.finish()

    def _room(self, kind: Kind) -> Any:
        """[tokens, ...], of one kind."""
        import torch

        if kind not in self._buffers or len(self._buffers[kind]) < self._total:
            self._buffers.pop(kind, None)  # before the next is made: not both at once
            dtype, *dimensions = kind
            with torch.inference_mode(False):  # so that it may be written in any mode
                self._buffers[kind] = planes(self._total, *dimensions, dtype=dtype, device=self._device)
        return self._buffers[kind][: self._total]
