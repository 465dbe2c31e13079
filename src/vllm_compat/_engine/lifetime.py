"""The start and the end of vLLM's EngineCore in this process; where it does not start, nothing of it is left."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Generator
from typing import Any

from vllm_compat._engine.sockets import close_sockets, find_sockets

__all__ = ["shut_down", "start"]

logger = logging.getLogger(__name__)


def start(config: Any) -> Any:
    """An EngineCore of this ``VllmConfig``.

    vLLM forgets its workers when it fails after they are up, for want of room for the KV cache say: they would hold
    their devices' memory, in which the caller may want to try something smaller, until this process ends.
    """
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.abstract import Executor

    held: list[Any] = []
    executor_class: Any = Executor.get_class(config)

    class Held(executor_class):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            held.append(self)  # before its own start, which may fail, too
            super().__init__(*args, **kwargs)

    try:
        core = EngineCore(config, Held, log_stats=False)
    except BaseException:
        if held:
            shut_down(held)
        raise
    held.clear()
    return core


def shut_down(held: list[Any]) -> None:
    """Shut an EngineCore down and leave the process fit to open another.

    A fault of vLLM's own on the way out is logged and no more: what the engine was opened for is done by then.

    Args:
        held: the EngineCore alone, or its executor where that is all there is. It is taken out, or the model would
            still be in use when memory is given back.
    """
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    one = held.pop()
    sockets: list[Any] = []
    with _logged():  # 0.20 to 0.22 on a CPU, in this process: the worker wants to wait for a GPU
        sockets = find_sockets(getattr(one, "model_executor", one))
        one.shutdown()
    del one
    close_sockets(sockets)
    gc.unfreeze()  # EngineCore froze what was alive at its start; vLLM itself thaws it from 0.20 on
    with _logged():  # a device that failed fails here again, and must not hide why
        cleanup_dist_env_and_memory()


@contextlib.contextmanager
def _logged() -> Generator[None, None, None]:
    try:
        yield
    except Exception as error:
        logger.warning("vLLM did not shut down cleanly: %s: %s", type(error).__name__, error)
