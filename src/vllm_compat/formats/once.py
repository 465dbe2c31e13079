"""Warnings that are worth one line, however often the same check is made."""

from __future__ import annotations

import functools
import logging

__all__ = ["warn_once"]

logger = logging.getLogger(__name__)


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning; nothing when this process has logged it before."""
    logger.warning("%s", text)
