"""The same rows as a file of every kind, each written by somebody else's code."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

__all__ = ["WRITERS", "Row", "as_lines"]

Row: TypeAlias = dict[str, Any]


def as_lines(rows: Sequence[Row], end: str = "\n") -> bytes:
    """JSONL."""
    return "".join(json.dumps(row, ensure_ascii=False) + end for row in rows).encode()


def _plain(path: Path, rows: Sequence[Row]) -> None:
    path.write_bytes(as_lines(rows))


def _crlf_with_bom(path: Path, rows: Sequence[Row]) -> None:
    path.write_bytes(b"\xef\xbb\xbf" + as_lines(rows, "\r\n"))


def _gzip(path: Path, rows: Sequence[Row]) -> None:
    data = as_lines(rows)
    path.write_bytes(gzip.compress(data[: len(data) // 2]) + gzip.compress(data[len(data) // 2 :]))


def _zstd(path: Path, rows: Sequence[Row]) -> None:
    compress = import_module("zstandard").ZstdCompressor().compress
    data = as_lines(rows)
    skippable = b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc"
    path.write_bytes(skippable + compress(data[: len(data) // 2]) + compress(data[len(data) // 2 :]))


def _table(rows: Sequence[Row]) -> Any:
    pa = import_module("pyarrow")
    names = list(dict.fromkeys(name for row in rows for name in row)) or ["input_ids"]
    columns = {name: pa.array([row.get(name) for row in rows]) for name in names}
    return pa.table(columns)


def _parquet(path: Path, rows: Sequence[Row]) -> None:
    import_module("pyarrow.parquet").write_table(_table(rows), str(path), row_group_size=3)


def _arrow_stream(path: Path, rows: Sequence[Row]) -> None:
    pa, table = import_module("pyarrow"), _table(rows)
    with path.open("wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=2)


def _arrow_file(path: Path, rows: Sequence[Row]) -> None:
    pa, table = import_module("pyarrow"), _table(rows)
    with path.open("wb") as sink, pa.ipc.new_file(sink, table.schema) as file:
        file.write_table(table, max_chunksize=2)


def _saved_dataset(path: Path, rows: Sequence[Row]) -> None:
    datasets: Any = import_module("datasets")
    datasets.disable_progress_bars()
    dataset = datasets.Dataset(_table(rows)) if rows else datasets.Dataset.from_dict({"input_ids": []})
    dataset.save_to_disk(str(path), num_shards=min(2, max(len(rows), 1)))


WRITERS: dict[str, Callable[[Path, Sequence[Row]], None]] = {
    "plain": _plain,
    "CRLF and BOM": _crlf_with_bom,
    "gzip": _gzip,
    **({"zstd": _zstd} if find_spec("zstandard") else {}),
    **({"parquet": _parquet, "arrow stream": _arrow_stream, "arrow file": _arrow_file} if find_spec("pyarrow") else {}),
    **({"saved dataset": _saved_dataset} if find_spec("datasets") else {}),
}
