"""The files of a run that are no samples, and what each was when the run was sealed: ``sidecars`` in ``run.json``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vllm_compat.extract.checksum import xxh3_of_file
from vllm_compat.extract.files import storage
from vllm_compat.formats import Format, SealedRun

__all__ = ["Sidecar", "look_at", "write_sidecars"]


@dataclass(frozen=True, slots=True)
class Sidecar:
    """One of them.

    Attributes:
        file: its name, relative to the run's folder.
        bytes: its size.
        xxh3: its digest, 16 hexadecimal digits.
    """

    file: str
    bytes: int
    xxh3: str


def write_sidecars(folder: Path, form: Format, run: SealedRun) -> tuple[Sidecar, ...]:
    """Write what a format has beside the samples.

    Raises:
        VllmCompatError: what ``Format.seal`` raises.
        StorageError: one cannot be read again.
    """
    names = form.seal(folder, run)
    with storage(folder, "read"):
        return tuple(look_at(folder, name) for name in names)


def look_at(folder: Path, name: str) -> Sidecar:
    """A file as it is.

    Raises:
        OSError: it cannot be read.
    """
    path = folder / name
    return Sidecar(name, path.stat().st_size, xxh3_of_file(path))
