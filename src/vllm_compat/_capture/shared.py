"""Rows that a later request need not forward again, because it begins with the same tokens. Runs in the worker.

With prefix caching vLLM forwards a shared beginning once; whoever takes it out of the KV cache gets its rows from here.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from vllm_compat._capture.kept import KeptRows

__all__ = ["SharedRows"]

_UNIT = 16
"""Beginnings of a prompt are looked up by their hash at each of so many tokens; others one by one."""


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    request_id: str
    token_ids: Sequence[int]
    rows: KeptRows

    def has(self, token_ids: list[int]) -> bool:
        """Whether its first rows, all of which are written, are those of these tokens: of its prompt and its answer."""
        count, prompt = len(token_ids), len(self.token_ids)
        if len(self.rows) < count or list(self.token_ids[:count]) != token_ids[:prompt]:
            return False
        return count <= prompt or self.rows.first(count)[0][prompt:].tolist() == token_ids[prompt:]


class SharedRows:
    """The rows of requests, in the order in which they began, until they are forgotten.

    An id may be there twice, of a request that has ended and of one that was made anew.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._numbers = itertools.count()
        self._first: dict[int, int] = {}

    def add(self, request_id: str, token_ids: Sequence[int], rows: KeptRows) -> None:
        """One more request."""
        number = next(self._numbers)
        self._entries[number] = _Entry(request_id, token_ids, rows)
        for start in _hashes(token_ids):
            self._first.setdefault(start, number)

    def prompt_of(self, rows: KeptRows) -> Sequence[int]:
        """The tokens that a request began with; none where it is not known."""
        return next((entry.token_ids for entry in self._entries.values() if entry.rows is rows), ())

    def find(self, token_ids: Sequence[int], count: int, unfilled: Collection[KeptRows]) -> KeptRows | None:
        """Rows whose first ``count`` are of the same tokens.

        Args:
            token_ids: of the request that wants them.
            count: how many.
            unfilled: rows that wait for another's themselves, among them those of the request.
        """
        wanted = list(token_ids[:count])
        if count % _UNIT == 0 and (number := self._first.get([*_hashes(wanted)][-1])) is not None:
            likely = self._entries[number]
            if likely.rows not in unfilled and likely.has(wanted):
                return likely.rows
        others = (entry for entry in self._entries.values() if entry.rows not in unfilled)
        return next((entry.rows for entry in others if entry.has(wanted)), None)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drop the oldest request of each of these ids."""
        left = Counter(request_ids)
        for number, entry in list(self._entries.items()):
            if left[entry.request_id]:
                left[entry.request_id] -= 1
                del self._entries[number]
        self._first.clear()
        for number, entry in self._entries.items():
            for start in _hashes(entry.token_ids):
                self._first.setdefault(start, number)

    def clear(self) -> None:
        """Drop all."""
        self._entries.clear()
        self._first.clear()


def _hashes(token_ids: Sequence[int]) -> Iterator[int]:
    """Of each beginning that is a number of units long, the shortest first."""
    found = 0
    for end in range(_UNIT, len(token_ids) + 1, _UNIT):
        found = hash((found, *token_ids[end - _UNIT : end]))
        yield found
