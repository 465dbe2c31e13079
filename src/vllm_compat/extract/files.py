"""Files that are there as a whole or not at all, and the safetensors layout.

The layout is public and never changes, and it is written here: the functions of safetensors that serialize raw bytes
take other arguments in other releases, and they leave no say over the file's mode, its sync, or a full disk.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from vllm_compat.errors import VllmCompatError
from vllm_compat.extract.tensors import Blob

__all__ = ["safetensors_parts", "write_whole"]

_Part: TypeAlias = bytes | memoryview


def safetensors_parts(blobs: Mapping[str, Blob], metadata: Mapping[str, str]) -> list[_Part]:
    """The parts of a safetensors file: length of the header, header, then each tensor's bytes.

    Args:
        blobs: name -> tensor; those of wider elements first, so that each begins at a multiple of its element's size.
        metadata: text for the header.
    """
    header: dict[str, object] = {"__metadata__": {name: _utf8(text) for name, text in metadata.items()}}
    end = 0
    for name, blob in blobs.items():
        begin, end = end, end + len(blob.data)
        header[name] = {"dtype": blob.dtype, "shape": blob.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, *(blob.data for blob in blobs.values())]


def write_whole(path: Path, parts: Sequence[_Part]) -> int:
    """Write a file that is under its name only when all of it is on disk; returns its size in bytes.

    Until then it has a hidden name in the same folder, without the suffix that readers look for. The mode is the
    umask's.

    Raises:
        VllmCompatError: it cannot be written; nothing of it is left.
    """
    temporary = path.with_name(f".{path.stem}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        try:
            size = _write(temporary, parts)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)
    except OSError as error:
        raise VllmCompatError(f"{path} cannot be written: {error.strerror or error}") from error
    return size


def _write(path: Path, parts: Sequence[_Part]) -> int:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        size = 0
        for part in parts:
            left = memoryview(part)
            while left:
                written = os.write(descriptor, left)
                size, left = size + written, left[written:]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return size


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that syncs no folders
            raise
    finally:
        os.close(descriptor)


def _utf8(text: str) -> str:
    """Text that UTF-8 can hold: the name of a folder need not be."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
