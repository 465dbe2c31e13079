"""Samples with the same tokens: found by checksums while the input is checked, and kept in the run's folder."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vllm_compat.extract.checksum import xxh3_128

__all__ = ["DuplicateFinder", "Duplicates", "Originals", "packed_ids"]


@dataclass(frozen=True, slots=True, eq=False)
class Duplicates:
    """Groups of samples with the same tokens, in 8 bytes a sample and 16 a group.

    Attributes:
        numbers: for each group how many tokens each of its samples has, how many samples there are, and their indices,
            rising.
    """

    numbers: array[int]

    def __len__(self) -> int:
        """How many samples have the tokens of an earlier one."""
        return sum(len(members) - 1 for _, members in self.groups())

    def groups(self) -> Iterator[tuple[int, array[int]]]:
        """The tokens and the indices of each group."""
        at = 0
        while at < len(self.numbers):
            tokens, count = self.numbers[at], self.numbers[at + 1]
            yield tokens, self.numbers[at + 2 : at + 2 + count]
            at += 2 + count

    def originals(self, shard: tuple[int, int]) -> Originals:
        """Which sample of a shard has the tokens of which later one of it."""
        mine, count = shard
        pairs: list[tuple[int, int, int]] = []
        for tokens, members in self.groups():
            own = [index for index in members if index % count == mine]
            pairs += [(index, own[0], tokens) for index in own[1:]]
        pairs.sort()
        return Originals(*(array("Q", column) for column in zip(*pairs, strict=True))) if pairs else Originals()


class Originals:
    """Sample -> the earliest sample of the same shard that has the same tokens; 24 bytes for each that has one."""

    def __init__(
        self,
        indices: Sequence[int] = (),
        originals: Sequence[int] = (),
        tokens: Sequence[int] = (),
    ) -> None:
        self._indices = indices
        self._originals = originals
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """The index of each duplicate, that of its original, and how many tokens they have."""
        return zip(self._indices, self._originals, self._tokens, strict=True)

    def __contains__(self, index: int) -> bool:
        return self.of(index) is not None

    def of(self, index: int) -> int | None:
        """The original of a sample; None for one that is no duplicate."""
        at = bisect_left(self._indices, index)
        return self._originals[at] if at < len(self._indices) and self._indices[at] == index else None


class DuplicateFinder:
    """Finds them by 72 bits of checksum, in 20 bytes a sample; who uses a duplicate compares the tokens themselves."""

    def __init__(self) -> None:
        self._buckets = [_Bucket() for _ in range(256)]  # to look at one of them at a time takes little memory

    def add(self, index: int, token_ids: Sequence[int]) -> None:
        """One more sample; indices rise."""
        checksum = xxh3_128(packed_ids(token_ids))
        self._buckets[checksum & 255].add(checksum >> 64, index, len(token_ids))

    def found(self) -> Duplicates | None:
        """What there is; None for nothing."""
        numbers = array("Q")
        for bucket in self._buckets:
            for tokens, members in bucket.groups():
                numbers.extend((tokens, len(members), *members))
        return Duplicates(numbers) if numbers else None


class _Bucket:
    def __init__(self) -> None:
        self._checksums = array("Q")
        self._indices = array("Q")
        self._counts = array("I")

    def add(self, checksum: int, index: int, count: int) -> None:
        self._checksums.append(checksum)
        self._indices.append(index)
        self._counts.append(count)

    def groups(self) -> Iterator[tuple[int, list[int]]]:
        repeated = _repeated(self._checksums)
        found: dict[int, tuple[int, list[int]]] = {}
        for checksum, index, count in zip(self._checksums, self._indices, self._counts, strict=True):
            if checksum in repeated:
                found.setdefault(checksum, (count, []))[1].append(index)
        yield from found.values()


def packed_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as bytes, other bytes for other ids."""
    try:
        return array("q", token_ids).tobytes()
    except OverflowError:  # no vocabulary is so large; the engine's check refuses it
        return repr(token_ids).encode()


def _repeated(numbers: array[int]) -> set[int]:
    seen: set[int] = set()
    repeated: set[int] = set()
    for number in numbers:
        (repeated if number in seen else seen).add(number)
    return repeated
