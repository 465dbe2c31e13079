"""The sockets between the engine's process and its workers, which vLLM leaves to Python to close.

After a failed step its traceback holds them in a cycle. Python, when it collects that, may come to the sockets' ZeroMQ
context first, and that waits for the sockets: the process hangs, at whatever it happens to be doing by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

__all__ = ["close_sockets", "find_sockets"]

_OWNERS = ("vllm.v1.executor.", "vllm.distributed.device_communicators.shm_broadcast")


def find_sockets(executor: Any) -> list[Any]:
    """Those of an executor, and of what it says of its workers; none where these are in this process."""
    zmq: Any = import_module("zmq")
    found: list[Any] = []
    seen: set[int] = set()
    left = [executor]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, zmq.Socket):
            found.append(one)
        elif isinstance(one, list | tuple):
            left += one
        elif one is executor or type(one).__module__.startswith(_OWNERS):
            left += getattr(one, "__dict__", {}).values()
    return found


def close_sockets(sockets: Sequence[Any]) -> None:
    """What is still to be sent has nobody to receive it."""
    for socket in sockets:
        socket.close(linger=0)
