"""Where the commands' log lines go."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator

__all__ = ["logging_to_stderr"]


@contextlib.contextmanager
def logging_to_stderr() -> Generator[None, None, None]:
    """Our log lines go to stderr, from INFO on, each once; afterwards the logger is as it was."""
    logger = logging.getLogger("vllm_compat")
    level, propagate = logger.level, logger.propagate
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # something that vLLM imports may log every line again
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
