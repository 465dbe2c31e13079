"""What the engine calls in every worker."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_compat._capture.division import Division
from vllm_compat._capture.interrupts import heed_interrupts, ignore_interrupts
from vllm_compat._capture.lending import LendingMemory, Lent
from vllm_compat._capture.memory import Memory
from vllm_compat._capture.tap import Captured, Tap
from vllm_compat.types import LayerId

__all__ = ["EXTENSION", "Answer", "Order", "VllmCompatExtension"]

EXTENSION = "vllm_compat._capture.extension.VllmCompatExtension"


@dataclass(frozen=True, slots=True)
class Order:
    """What the engine wants of every worker.

    Attributes:
        finished: requests whose states are handed out, and forgotten here.
        dropped: requests whose rows are forgotten.
        wait: for rows that are still on their way to the host.
        retired: requests whose rows no other will need any more.
        near: workers that may lend their memory.
        returned: worker -> the blocks it lent that nobody holds any more.
    """

    finished: Sequence[str] = ()
    dropped: Sequence[str] = ()
    wait: bool = True
    retired: Sequence[str] = ()
    near: Sequence[str] = ()
    returned: Mapping[str, Sequence[int]] = field(default_factory=dict[str, list[int]])


@dataclass(frozen=True, slots=True)
class Answer:
    """What a worker that captures says to that.

    Attributes:
        fault: that ended capturing, or None.
        rows: of the finished requests that are this worker's; None for one whose last rows are still on their way.
        worker: who answers, where it has memory to lend.
        gone: blocks that it will not lend again.
    """

    fault: str | None
    rows: dict[str, Captured | None]
    worker: str = ""
    gone: Sequence[int] = ()


class VllmCompatExtension:
    """vLLM mixes this into its worker class, and refuses any name that the worker has: hence the prefixes.

    The methods also serve as plain functions of a worker, for one that was built without the extension.
    """

    vllm_compat_tap: Tap | None = None
    vllm_compat_memory: Memory | None = None
    vllm_compat_interrupt: Any = None

    def vllm_compat_install(
        self: Any, layer_ids: Sequence[LayerId], states: str, owner: int, shares: bool = False
    ) -> Lent | None:
        """Tap this worker's layers.

        Tensor-parallel ranks have the same rows: each captures its share of the requests, or, where requests share
        rows, the first rank all of them.

        Args:
            layer_ids: what to capture.
            states: how; see ``StateSource``.
            owner: process of the engine.
            shares: whether requests that begin with the same tokens share their rows.

        Returns:
            Something to read for the engine, if this worker has memory to lend.
        """
        from vllm.distributed.parallel_state import (
            get_tensor_model_parallel_rank,
            get_tensor_model_parallel_world_size,
        )

        self.vllm_compat_interrupt = ignore_interrupts(owner)
        rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        if shares and rank:
            self.vllm_compat_tap = self.vllm_compat_memory = None
            return None
        lends = os.getpid() != owner and hasattr(os, "memfd_create")
        memory = self.vllm_compat_memory = LendingMemory() if lends else Memory()
        division = Division() if shares else Division(rank, ranks)
        self.vllm_compat_tap = Tap(self, layer_ids, states, shares=shares, division=division, memory=memory)
        return memory.probe() if isinstance(memory, LendingMemory) else None

    def vllm_compat_collect(self: Any, order: Order) -> Answer | None:
        """``Tap.collect`` of a rank that captures; None from the others."""
        tap: Tap | None = self.vllm_compat_tap
        if tap is None:
            return None
        memory = self.vllm_compat_memory
        if not isinstance(memory, LendingMemory):
            return Answer(*tap.collect(order.finished, order.dropped, order.wait, order.retired))
        memory.returned(order.returned.get(memory.worker, ()))
        lend = memory.worker in order.near
        fault, rows = tap.collect(order.finished, order.dropped, order.wait, order.retired, lend)
        return Answer(fault, rows, memory.worker, memory.gone())

    def vllm_compat_remove(self: Any) -> None:
        """End capturing, if it ever began."""
        tap: Tap | None = getattr(self, "vllm_compat_tap", None)
        if tap is not None:
            tap.remove()
            self.vllm_compat_tap = self.vllm_compat_memory = None
        heed_interrupts(getattr(self, "vllm_compat_interrupt", None))
        self.vllm_compat_interrupt = None
