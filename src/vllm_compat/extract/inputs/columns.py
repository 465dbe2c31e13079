"""What parquet and arrow have in common: columns in batches, of which one row at a time becomes plain types."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterator
from importlib import import_module
from typing import Any, TypeAlias, cast

from vllm_compat.errors import UsageError, VllmCompatError
from vllm_compat.extract.inputs.source import Source, SourceError
from vllm_compat.extract.rows import COLUMNS

__all__ = ["Columns", "load_pyarrow"]

_Cell: TypeAlias = tuple[Any, int]
_CODES = {
    **{"int8": "b", "int16": "h", "int32": "i", "int64": "q"},
    **{"uint8": "B", "uint16": "H", "uint32": "I", "uint64": "Q"},
}
"""Arrow's type -> that of ``memoryview``."""


class Columns(Source):
    """Rows of record batches. A null is what a missing key is in JSON, for no column can leave one out."""

    @abstractmethod
    def batches(self) -> Iterator[Any]:
        """The record batches in order, with at least the columns that are known here.

        Raises:
            OSError, SourceError, ValueError: the file cannot be read; pyarrow's errors are the last.
        """

    def rows(self) -> Generator[tuple[int, _Cell], None, None]:
        number = 0
        try:
            for batch in self.batches():
                for at in range(batch.num_rows):
                    number += 1
                    yield number, (batch, at)
        except VllmCompatError:
            raise
        except ValueError as error:
            raise SourceError(f"it is damaged after row {number}: {error}") from error

    def fields(self, raw: _Cell) -> dict[str, Any] | list[str]:
        batch, at = raw
        try:
            found = {name: _plain(batch.column(name)[at]) for name in known_columns(batch.schema.names)}
        except UnicodeDecodeError as error:
            return [f"text that is not UTF-8: {error}"]
        return {name: value for name, value in found.items() if value is not None}


def load_pyarrow(what: str, module: str = "pyarrow") -> Any:
    """A module of pyarrow.

    Raises:
        UsageError: it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise UsageError(
            f"the input is {what}, which takes the package pyarrow ({error}): pip install 'vllm-compat[parquet]'"
        ) from error


def known_columns(names: list[str]) -> list[str]:
    """Those that mean something here.

    Raises:
        SourceError: one is there twice.
    """
    found = [name for name in names if name in COLUMNS]
    if len(set(found)) < len(found):
        raise SourceError(f"it has two columns {next(n for n in found if found.count(n) > 1)!r}")
    return found


def _plain(cell: Any) -> Any:
    """A cell in plain types; lists of integers, which are long, without an object of pyarrow's for each."""
    values: Any = getattr(cell, "values", None) if cell.is_valid else None
    code: Any = _CODES.get(str(getattr(values, "type", None)))
    if code is None or values.null_count:
        return _without_nulls(cell.as_py())
    size = values.type.bit_width // 8
    begin, end = values.offset * size, (values.offset + len(values)) * size
    return memoryview(values.buffers()[1])[begin:end].cast("B").cast(code).tolist() if len(values) else []


def _without_nulls(value: Any) -> Any:
    """Structs without the keys that are null: a column has every key in every row."""
    if isinstance(value, dict):
        found = cast("dict[str, Any]", value)
        return {name: _without_nulls(each) for name, each in found.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
