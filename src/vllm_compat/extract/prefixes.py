"""Samples that begin with the same tokens, brought together so that what they share is forwarded once."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator

from vllm_compat.extract.inputs import Sample

__all__ = ["Forwarded", "neighbours"]

logger = logging.getLogger(__name__)

_WINDOW = 1024
"""Samples that are looked through at a time: turns of a conversation lie together, system prompts are everywhere."""


def neighbours(samples: Iterator[Sample]) -> Iterator[Sample]:
    """The same samples, a window of them at a time in the order of their tokens: what begins alike follows."""
    while window := list(itertools.islice(samples, _WINDOW)):
        yield from sorted(window, key=lambda sample: sample.token_ids)


class Forwarded:
    """How many tokens the model was given, of those that samples have."""

    def __init__(self) -> None:
        self.tokens = 0

    def add(self, tokens: int) -> None:
        """One more step."""
        self.tokens += tokens

    def log(self, tokens: int) -> None:
        """Say what sharing came to.

        Args:
            tokens: of all samples that were made.
        """
        if tokens:
            logger.info(
                "%d of %d tokens were forwarded, the others are the beginning of another sample: %.2f tokens for each",
                *(self.tokens, tokens, tokens / max(self.tokens, 1)),
            )
