"""SIGINT in the workers' processes, to which Ctrl-C on a terminal goes as it does to the engine's own."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from typing import Any

__all__ = ["heed_interrupts", "ignore_interrupts"]


def ignore_interrupts(owner: int) -> Any:
    """Ignore SIGINT where this process is a child of the engine's: what that is to finish takes its workers.

    They end with the engine, or by SIGTERM.

    Args:
        owner: process of the engine.

    Returns:
        What SIGINT did before, for ``heed_interrupts``; None where nothing was changed.
    """
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid != owner or threading.current_thread() is not threading.main_thread():
        return None
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    return signal.SIG_DFL if before is None else before


def heed_interrupts(before: Any) -> None:
    """Put back what ``ignore_interrupts`` returned."""
    if before is not None:
        signal.signal(signal.SIGINT, before)
