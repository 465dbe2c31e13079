"""Which requests share what is cached: those of one epoch, whose rows are kept for as long as one of them may ask."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field

__all__ = ["Epochs"]


@dataclass(slots=True)
class _Epoch:
    salt: str
    num_tokens: int = 0
    request_ids: list[str] = field(default_factory=list[str])
    under_way: int = 0


class Epochs:
    """Divides requests into epochs of bounded size, by the salt that their blocks are hashed with.

    A cached block is only ever found by a request of the epoch that computed it, so that the rows of an epoch can go
    once another has begun and the last of its requests has ended.
    """

    def __init__(self, max_tokens: int) -> None:
        """Begin the first one.

        Args:
            max_tokens: of an epoch; a longer request has one of its own.
        """
        self._max_tokens = max_tokens
        self._numbers = itertools.count()
        self._epochs = deque([_Epoch(self._salt())])
        self._of: dict[str, _Epoch] = {}

    def salt(self, request_id: str, num_tokens: int) -> str:
        """Put a new request into the newest epoch; the salt of its blocks."""
        newest = self._epochs[-1]
        if newest.request_ids and newest.num_tokens + num_tokens > self._max_tokens:
            newest = _Epoch(self._salt())
            self._epochs.append(newest)
        newest.num_tokens += num_tokens
        newest.request_ids.append(request_id)
        newest.under_way += 1
        self._of[request_id] = newest
        return newest.salt

    def end(self, request_id: str) -> None:
        """A request has ended, and was collected or dropped."""
        self._of.pop(request_id).under_way -= 1

    def retired(self) -> list[str]:
        """The requests of the epochs that are over, each told of once; the oldest epoch first."""
        found: list[str] = []
        while len(self._epochs) > 1 and not self._epochs[0].under_way:
            found += self._epochs.popleft().request_ids
        return found

    def _salt(self) -> str:
        return f"vllm-compat-{next(self._numbers)}"
