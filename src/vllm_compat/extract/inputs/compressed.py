"""The bytes of a file that may be compressed by gzip or zstd, told by its first bytes."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, cast

from vllm_compat.errors import UsageError
from vllm_compat.extract.inputs.source import SourceError

__all__ = ["open_bytes"]

_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_SKIPPABLE = tuple(bytes([0x50 + n]) + b"\x2a\x4d\x18" for n in range(16))  # a frame of zstd that has no data
_PART = 1 << 20


@contextmanager
def open_bytes(path: Path) -> Generator[BinaryIO, None, None]:
    """The file's own bytes, or those that it holds compressed.

    Raises:
        OSError: it cannot be opened.
        SourceError: compressed data that is damaged or cut short.
        UsageError: it is zstd, and nothing that reads it is installed.
    """
    with path.open("rb") as file:
        start = file.read(4)
        file.seek(0)
        try:
            if start.startswith(_GZIP):
                with gzip.GzipFile(fileobj=file) as unpacked:
                    yield cast("BinaryIO", unpacked)
            elif start.startswith((_ZSTD, *_SKIPPABLE)):
                with io.BufferedReader(_Zstd(file), _PART) as unpacked_zstd:
                    yield cast("BinaryIO", unpacked_zstd)
            else:
                yield file
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise SourceError(f"the gzip data is damaged or cut short: {error}") from error


class _Zstd(io.RawIOBase):
    """The bytes in the frames of a zstd file. Unlike the package's own reader it tells when the last is cut short."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._new, self._error = _zstd()
        self._frame: Any = None
        self._left = b""
        self._unread = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        while not self._left:
            if not self._more():
                return 0
        count = min(len(view), len(self._left))
        view[:count] = self._left[:count]
        self._left = self._left[count:]
        return count

    def _more(self) -> bool:
        part = self._unread or self._file.read(_PART // 8)
        self._unread = b""
        if not part:
            if self._frame is not None:
                raise SourceError("the zstd data is cut short")
            return False
        if self._frame is None:
            self._frame = self._new()
        try:
            self._left = self._frame.decompress(part)
        except self._error as error:
            raise SourceError(f"the zstd data is damaged: {error}") from error
        if self._frame.eof:
            self._unread, self._frame = self._frame.unused_data, None
        return True


def _zstd() -> tuple[Any, Any]:
    """What makes a decompressor of one frame, and the error that it raises: Python's own, or the package's."""
    try:
        own: Any = import_module("compression.zstd")  # Python 3.14 has it, unless it was built without
    except ImportError:
        pass
    else:
        return own.ZstdDecompressor, own.ZstdError
    try:
        package: Any = import_module("zstandard")
    except ImportError as error:
        raise UsageError(
            f"the input is compressed by zstd, which takes the package zstandard ({error}): "
            "pip install 'vllm-compat[zstd]'"
        ) from error
    return lambda: package.ZstdDecompressor(max_window_size=1 << 31).decompressobj(), package.ZstdError
