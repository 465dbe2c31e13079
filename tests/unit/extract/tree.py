"""What must be the same, byte by byte, however often a run was ended on its way."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from vllm_compat.extract.checksum import xxh3
from vllm_compat.extract.done import SealedEntries
from vllm_compat.extract.journal import Entry

__all__ = ["tree_of"]

_OF_THE_PROCESS = ("run.json", ".lock")


def tree_of(folder: Path) -> tuple[dict[str, bytes], list[Entry]]:
    """Every file but the journals, ``run.json`` and the lock; and the entry that counts for each sample.

    On the way each entry is compared with its file, and each unfinished file is an error.
    """
    files = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in _OF_THE_PROCESS and not path.name.startswith("journal-")
    }
    assert not [name for name in files if ".tmp-" in name]
    entries = list(SealedEntries(folder, json.loads((folder / "run.json").read_text())["identity"]["num_samples"]))
    for entry in entries:
        if not entry.skipped:
            assert (len(files[entry.file]), xxh3([files[entry.file]])) == (entry.bytes, entry.xxh3), entry
    return files, [dataclasses.replace(entry, again=0) for entry in entries]
