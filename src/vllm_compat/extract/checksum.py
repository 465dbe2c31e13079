"""XXH3: 13.8 GB/s on one core, where SHA-256 makes 0.5; it finds what disks do, not what an enemy does."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Protocol

from vllm_compat.errors import UsageError

__all__ = ["Hasher", "new_hash", "xxh3", "xxh3_128", "xxh3_of_file"]


_PART = 1 << 20


class Hasher(Protocol):
    """What ``new_hash`` returns."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Add bytes."""
        ...

    def hexdigest(self) -> str:
        """16 hexadecimal digits."""
        ...


def new_hash() -> Hasher:
    """A new XXH3 of 64 bits.

    Raises:
        UsageError: the package ``xxhash`` is not installed.
    """
    try:
        hasher: Hasher = import_module("xxhash").xxh3_64()
    except ImportError as error:
        raise UsageError(
            f"checksums need the package xxhash ({error}); install it, or all of `vllm-compat[extract]`"
        ) from error
    return hasher


def xxh3(parts: Iterable[bytes | memoryview]) -> str:
    """The digest of a file's bytes, in order.

    Raises:
        UsageError: the package ``xxhash`` is not installed.
    """
    hasher = new_hash()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


def xxh3_128(data: bytes) -> int:
    """The digest of 128 bits.

    Raises:
        UsageError: the package ``xxhash`` is not installed.
    """
    new_hash()  # its error says what to install
    digest: int = import_module("xxhash").xxh3_128_intdigest(data)
    return digest


def xxh3_of_file(path: Path) -> str:
    """The digest of a file.

    Raises:
        OSError: it cannot be read.
        UsageError: the package ``xxhash`` is not installed.
    """
    with path.open("rb") as file:
        return xxh3(iter(lambda: file.read(_PART), b""))
