"""Arrow's own format: a bare file or stream, and the folder that ``Dataset.save_to_disk`` of HF datasets makes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from vllm_compat.extract.checksum import new_hash
from vllm_compat.extract.inputs.columns import Columns, load_pyarrow
from vllm_compat.extract.inputs.source import SourceError, Stamp, file_stamp

__all__ = ["ArrowFile", "ArrowFolder"]

_STATE = "state.json"
_SEVERAL = "dataset_dict.json"


class ArrowFile(Columns):
    """One file, of which one batch is held."""

    def batches(self) -> Iterator[Any]:
        return _batches(self.path)


class ArrowFolder(Columns):
    """A dataset that was saved to disk: ``state.json`` and the streams that it names."""

    def __init__(self, path: Path) -> None:
        """Read which files there are.

        Raises:
            OSError, SourceError: it is no dataset's folder.
        """
        super().__init__(path)
        if (path / _SEVERAL).is_file():
            raise SourceError(f"it holds several datasets: {_splits(path)}. Give the folder of one of them")
        try:
            state = json.loads((path / _STATE).read_bytes())
            names = [file["filename"] for file in state["_data_files"]]
            rearranged = state.get("_indices_data_files")
        except FileNotFoundError:
            raise SourceError(
                f"not a regular file, nor the folder of a dataset: it has no {_STATE}. Wanted is a JSONL, parquet or "
                "arrow file, or what Dataset.save_to_disk made"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SourceError(f"{_STATE} is not that of a dataset: {error!r}") from error
        if rearranged:
            raise SourceError("its rows are rearranged by an index; save it again after flatten_indices()")
        if any(Path(name).name != name for name in map(str, names)):
            raise SourceError(f"{_STATE} names files outside of the folder: {names}")
        self._files = [path / name for name in names]

    def batches(self) -> Iterator[Any]:
        return chain.from_iterable(map(_batches, self._files))

    def stamp(self) -> Stamp:
        stamps = [file_stamp(file) for file in (self.path / _STATE, *self._files)]
        hasher = new_hash()
        hasher.update(repr(stamps).encode())
        return sum(size for size, _, _ in stamps), int(hasher.hexdigest(), 16) >> 1, len(stamps)


def _batches(path: Path) -> Iterator[Any]:
    pa = load_pyarrow("arrow")
    with pa.OSFile(str(path), "rb") as file:  # not mapped: a file that gets shorter would end the process
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        if not is_file:
            yield from pa.ipc.open_stream(file)
            return
        batches = pa.ipc.open_file(file)
        for number in range(batches.num_record_batches):
            yield batches.get_batch(number)


def _splits(folder: Path) -> str:
    try:
        return ", ".join(map(str, json.loads((folder / _SEVERAL).read_bytes())["splits"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        return repr(error)
