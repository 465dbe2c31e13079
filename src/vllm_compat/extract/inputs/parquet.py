"""Parquet, through pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_compat.extract.inputs.columns import Columns, known_columns, load_pyarrow

__all__ = ["ParquetFile"]

_ROWS_AT_ONCE = 64


class ParquetFile(Columns):
    """One file. Of a row group the pages that are under way are held, not the whole."""

    def batches(self) -> Iterator[Any]:
        parquet = load_pyarrow("parquet", "pyarrow.parquet")
        with parquet.ParquetFile(str(self.path), pre_buffer=False) as file:
            columns = known_columns(file.schema_arrow.names)
            yield from file.iter_batches(_ROWS_AT_ONCE, columns=columns, use_threads=False)
