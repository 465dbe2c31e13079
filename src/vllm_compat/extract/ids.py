"""Ids that must be unique, in 8 bytes each."""

from __future__ import annotations

from array import array
from collections import Counter

__all__ = ["Ids"]


class Ids:
    """Finds texts that were added twice by their hashes alone; which they are, only a second look can say."""

    def __init__(self) -> None:
        self._buckets = [array("q") for _ in range(256)]  # to count one bucket at a time takes little memory

    def add(self, text: str) -> None:
        """One more."""
        number = hash(text)
        self._buckets[number & 255].append(number)

    def repeated(self) -> set[int]:
        """The hashes of those that were added more than once; rarely also of two that only share it."""
        return {
            number
            for bucket in self._buckets
            if len(set(bucket)) < len(bucket)
            for number, count in Counter(bucket).items()
            if count > 1
        }
