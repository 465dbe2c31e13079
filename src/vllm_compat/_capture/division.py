"""Which tensor-parallel rank captures which request: all have the same rows, and each keeps its own requests'."""

from __future__ import annotations

__all__ = ["Division"]


class Division:
    """One rank's view. All ranks come to the same answers, because they are told of the same requests in one order.

    Args:
        rank: this one's number.
        ranks: how many there are.
    """

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self._rank = rank
        self._tokens = [0] * ranks
        self._others: set[str] = set()

    def is_ours(self, request_id: str, num_tokens: int) -> bool:
        """Whether this rank captures a request that begins: the one that has captured the fewest tokens does."""
        least = self._tokens.index(min(self._tokens))
        self._tokens[least] += max(num_tokens, 1)
        if least == self._rank:
            return True
        self._others.add(request_id)
        return False

    def is_others(self, request_id: str) -> bool:
        """Whether another rank captures a request that has begun."""
        return request_id in self._others

    def forget(self, request_id: str) -> None:
        """It has ended."""
        self._others.discard(request_id)
