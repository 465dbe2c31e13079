"""The rows of a run as a dataset of the library ``datasets``, with torch's tensors as its columns."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from vllm_compat.extract.files import remove, storage, write_whole
from vllm_compat.formats.base import Row

__all__ = ["write_dataset"]

_ROWS_AT_ONCE = 1000
_PART = 1 << 20
_SHARD = re.compile(r"data-\d{5}-of-\d{5}\.arrow")


def write_dataset(folder: Path, rows: Iterator[Row]) -> tuple[str, ...]:
    """Write ``input_ids``, ``loss_mask`` and ``seq_len`` of the rows into a folder, a thousand of them in memory.

    Returns:
        The names of the files.

    Raises:
        StorageError: it cannot be written.
    """
    temporary = folder / ".dataset.tmp"
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
    try:
        with storage(temporary, "written"):
            temporary.mkdir()
            _write(temporary / "rows.arrow", rows)
            _save(temporary / "rows.arrow", temporary / "saved")
        return _publish(temporary / "saved", folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(path: Path, rows: Iterator[Row]) -> None:
    pa: Any = import_module("pyarrow")
    numbers = pa.list_(pa.int64())
    schema = pa.schema({"input_ids": numbers, "loss_mask": numbers, "seq_len": pa.int64()})
    with path.open("wb") as file, pa.ipc.new_stream(file, schema) as stream:
        while some := list(islice(rows, _ROWS_AT_ONCE)):
            columns = [
                [row.token_ids for row in some],
                [row.loss_mask or (1,) * len(row.token_ids) for row in some],
                [len(row.token_ids) for row in some],
            ]
            stream.write_batch(pa.record_batch(columns, schema=schema))


def _save(stream: Path, folder: Path) -> None:
    datasets: Any = import_module("datasets")
    silent = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        dataset = datasets.Dataset.from_file(str(stream))
        dataset.with_format("torch").save_to_disk(str(folder))  # the trainer takes tensors from the columns
    finally:
        if not silent:
            datasets.enable_progress_bars()


def _publish(source: Path, folder: Path) -> tuple[str, ...]:
    """Put a saved dataset's files into a folder, each whole; ``state.json``, which names the others, comes last."""
    shards = sorted(path.name for path in source.glob("*.arrow"))
    names = (*shards, "dataset_info.json", "state.json")
    for name in names:
        write_whole(folder / name, _parts(source / name))
    for path in folder.iterdir():
        if _SHARD.fullmatch(path.name) and path.name not in shards:
            remove(path)  # of an earlier seal
    return names


def _parts(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while part := file.read(_PART):
            yield part
