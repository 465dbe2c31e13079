"""Samples with the same tokens are computed once: which, kept in the run's folder for the starts after the first."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from vllm_compat.extract.checksum import new_hash
from vllm_compat.extract.config import ExtractConfig
from vllm_compat.extract.files import storage, write_whole
from vllm_compat.extract.inputs import CheckedInput, Duplicates

__all__ = ["DUPLICATES_FILE", "keep_duplicates", "may_merge", "read_duplicates"]

DUPLICATES_FILE = "duplicates.jsonl"


def may_merge(config: ExtractConfig) -> bool:
    """Whether samples with the same tokens get the same states; answers that are drawn at random differ."""
    return not config.generate or config.sampling.get("temperature", 0) == 0


def keep_duplicates(folder: Path, checked: CheckedInput) -> None:
    """Write which samples of an input have the same tokens, if there are any and it is not there yet.

    Raises:
        StorageError: it cannot be written, or not be read.
    """
    if checked.duplicates and read_duplicates(folder, checked) is None:
        digest = new_hash()
        for line in _lines(checked.duplicates):
            digest.update(line)
        head = json.dumps({**_identity(checked), "xxh3": digest.hexdigest()}).encode() + b"\n"
        write_whole(folder / DUPLICATES_FILE, chain([head], _lines(checked.duplicates)))


def read_duplicates(folder: Path, checked: CheckedInput) -> Duplicates | None:
    """What was written for the same input, checked in the same way; None where it is not there, or damaged.

    Raises:
        StorageError: it cannot be read.
    """
    path, numbers, digest = folder / DUPLICATES_FILE, array("Q"), new_hash()
    with storage(path, "read"):
        try:
            with path.open("rb") as file:
                head: Any = json.loads(file.readline())
                for line in file:
                    digest.update(line)
                    tokens, *members = json.loads(line)
                    numbers.extend((tokens, len(members), *members))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, OverflowError):
            return None
    found = Duplicates(numbers)
    return found if head == {**_identity(checked), "xxh3": digest.hexdigest()} else None


def _identity(checked: CheckedInput) -> dict[str, Any]:
    """What groups of samples depend on, and their sum."""
    return {
        "input_xxh3": checked.xxh3,
        "max_tokens": checked.max_tokens,
        "overlong": checked.overlong,
        "num_samples": checked.num_samples,
        "num_duplicates": checked.num_duplicates,
    }


def _lines(duplicates: Duplicates) -> Iterator[bytes]:
    """A line for each group: how many tokens, then the samples that have them."""
    for tokens, members in duplicates.groups():
        yield json.dumps([tokens, *members], separators=(",", ":")).encode() + b"\n"
