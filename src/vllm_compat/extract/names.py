"""Names that may be asked for, in 8 bytes each."""

from __future__ import annotations

from array import array
from bisect import bisect_left

__all__ = ["Names"]


class Names:
    """Which names were added, by their hashes: rarely, one that was not seems to be there."""

    def __init__(self) -> None:
        self._buckets = [array("q") for _ in range(256)]  # to sort one bucket at a time takes little memory

    def add(self, name: str) -> None:
        """One more."""
        number = hash(name)
        self._buckets[number & 255].append(number)

    def end(self) -> None:
        """There are no more to come: from here on they may be asked for."""
        for place, bucket in enumerate(self._buckets):
            self._buckets[place] = array("q", sorted(bucket))

    def __contains__(self, name: str) -> bool:
        number = hash(name)
        bucket = self._buckets[number & 255]
        at = bisect_left(bucket, number)
        return at < len(bucket) and bucket[at] == number
