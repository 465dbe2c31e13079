"""What the engine calls in every worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_compat._capture.interrupts import heed_interrupts, ignore_interrupts
from vllm_compat._capture.tap import Captured, Tap
from vllm_compat.types import LayerId

__all__ = ["EXTENSION", "VllmCompatExtension"]

EXTENSION = "vllm_compat._capture.extension.VllmCompatExtension"


class VllmCompatExtension:
    """vLLM mixes this into its worker class, and refuses any name that the worker has: hence the prefixes.

    The methods also serve as plain functions of a worker, for one that was built without the extension.
    """

    vllm_compat_tap: Tap | None = None
    vllm_compat_interrupt: Any = None

    def vllm_compat_install(
        self: Any, layer_ids: Sequence[LayerId], states: str, owner: int, shares: bool = False
    ) -> None:
        """Tap this worker's layers if its rank is the one that captures: tensor-parallel ranks have the same rows.

        Args:
            layer_ids: what to capture.
            states: how; see ``StateSource``.
            owner: process of the engine.
            shares: whether requests that begin with the same tokens share their rows.
        """
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        self.vllm_compat_interrupt = ignore_interrupts(owner)
        captures = get_tensor_model_parallel_rank() == 0
        self.vllm_compat_tap = Tap(self, layer_ids, states, shares=shares) if captures else None

    def vllm_compat_collect(
        self: Any, finished: Sequence[str], dropped: Sequence[str], wait: bool, retired: Sequence[str] = ()
    ) -> tuple[str | None, dict[str, Captured | None]] | None:
        """``Tap.collect`` of the rank that captures; None from the others."""
        tap: Tap | None = self.vllm_compat_tap
        return tap.collect(finished, dropped, wait, retired) if tap else None

    def vllm_compat_remove(self: Any) -> None:
        """End capturing, if it ever began."""
        tap: Tap | None = getattr(self, "vllm_compat_tap", None)
        if tap is not None:
            tap.remove()
            self.vllm_compat_tap = None
        heed_interrupts(getattr(self, "vllm_compat_interrupt", None))
        self.vllm_compat_interrupt = None
