"""Sidecars, read by the library that readers read them with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from vllm_compat.errors import StorageError
from vllm_compat.formats import SealedRun, get_format

torch: Any = pytest.importorskip("torch")
datasets: Any = pytest.importorskip("datasets")


@dataclass(frozen=True)
class Done:
    index: int
    file: str
    tokens: int
    id: str | None = None


@dataclass(frozen=True)
class Row:
    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...] | None


ROWS = [Row((5, 6, 5), (0, 1, 1)), Row((7, 2**40), None), Row((5,), (1,))]


def sealed(rows: list[Row] = ROWS) -> SealedRun:
    entries = [Done(i, f"file {i}", len(row.token_ids)) for i, row in enumerate(rows)]
    return SealedRun(entries, lambda: iter(rows), len(rows), (1, 2, 3, 5), 6, "m", {})


@pytest.mark.parametrize("times", [1, 2])
def test_the_dataset(tmp_path: Path, times: int) -> None:
    (tmp_path / "data-00000-of-00007.arrow").write_bytes(b"of an earlier seal")
    (tmp_path / "data-of-mine.arrow").write_bytes(b"of the user")
    (tmp_path / ".dataset.tmp").mkdir()
    (tmp_path / ".dataset.tmp" / "rows.arrow").write_bytes(b"of a process that was killed")
    for _ in range(times):
        get_format("speculators").seal(tmp_path, sealed())
    found = datasets.load_from_disk(str(tmp_path))
    assert found.format["type"] == "torch"
    assert [row["input_ids"].tolist() for row in found] == [[5, 6, 5], [7, 2**40], [5]]
    assert [row["loss_mask"].tolist() for row in found] == [[0, 1, 1], [1, 1], [1]]
    assert found.with_format(None)["seq_len"][:] == [3, 2, 1]
    assert found[0]["input_ids"].dtype == torch.int64
    frequency = torch.load(tmp_path / "token_freq.pt", weights_only=True)
    assert frequency == {6: 1, 5: 2, 7: 1, 2**40: 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "data-00000-of-00001.arrow",
        "data-of-mine.arrow",
        "dataset_info.json",
        "draft_config.json",
        "state.json",
        "token_freq.pt",
    ]


def test_more_rows_than_are_held(tmp_path: Path) -> None:
    rows = [Row((i,) * (1 + i % 3), None) for i in range(2500)]
    held: list[int] = []

    def stream() -> Iterator[Row]:
        for row in rows:
            held.append(len(held))
            yield row

    run = SealedRun((), stream, len(rows), (1, 2, 3, 5), 6, "m", {})
    get_format("speculators").seal(tmp_path, run)
    found = datasets.load_from_disk(str(tmp_path))
    assert len(found) == 2500
    assert all(found[i]["input_ids"].tolist() == list(rows[i].token_ids) for i in (0, 999, 1000, 2000, 2499))
    assert len(held) == 5000, "one pass for the dataset, one for the frequencies"


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / ".dataset.tmp").write_bytes(b"a file where the folder goes")
    with pytest.raises(StorageError, match=r"\.dataset\.tmp cannot be written"):
        get_format("speculators").seal(tmp_path, sealed())


def test_lengths_of_v1(tmp_path: Path) -> None:
    run = sealed()
    skipped = Done(3, "", 9)
    with_skipped = SealedRun([*run.entries, skipped], run.rows, 4, run.layer_ids, 6, "m", {})
    get_format("speculators-v1").seal(tmp_path, with_skipped)
    assert json.loads((tmp_path / "sample_lengths.json").read_text()) == {"0": 3, "1": 2, "2": 1}
    assert not [path for path in tmp_path.iterdir() if path.name.endswith("pt")]
