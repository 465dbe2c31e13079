"""Files of every kind: told by their bytes, read as the types they have, and named when they are damaged."""

from __future__ import annotations

import gzip
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.unit.extract.input_files import WRITERS, Row, as_lines

from vllm_compat.errors import InputError, UsageError
from vllm_compat.extract.inputs import InputChangedError, check_input, read_samples, stamp_of
from vllm_compat.extract.inputs.source import open_source

ROWS: list[Row] = [
    {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "id": "a"},
    {"input_ids": [4], "id": "b"},
    {"input_ids": [5, 6], "loss_mask": [0, 0]},
    {"input_ids": [7] * 40, "loss_mask": [1] * 40, "id": "d"},
]
COLUMNAR = [kind for kind in WRITERS if kind in ("parquet", "arrow stream", "arrow file", "saved dataset")]


def refused(path: Path) -> list[str]:
    with pytest.raises(InputError) as caught:
        check_input(path, max_tokens=10)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize("kind", WRITERS)
def test_a_kind_is_told_by_its_bytes_and_not_by_its_name(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "data.txt"
    WRITERS[kind](path, ROWS)
    checked = check_input(path, max_tokens=10)
    samples = list(read_samples(checked))
    assert [(s.index, s.line, s.id, s.token_ids, s.loss_mask, s.truncated) for s in samples] == [
        (0, 1, "a", (1, 2, 3), (0, 1, 1), False),
        (1, 2, "b", (4,), None, False),
        (2, 3, None, (5, 6), (0, 0), False),
        (3, 4, "d", (7,) * 10, (1,) * 10, True),
    ]
    assert (checked.num_samples, checked.num_tokens, checked.num_truncated, checked.num_without_loss) == (4, 16, 1, 1)


def test_compressed_lines_are_the_same_run_and_columns_are_one_of_their_own(tmp_path: Path) -> None:
    digests = {}
    for kind, write in WRITERS.items():
        write(tmp_path / kind, ROWS)
        digests[kind] = check_input(tmp_path / kind, max_tokens=10).xxh3
    lines = {digest for kind, digest in digests.items() if kind not in COLUMNAR}
    columns = {digests[kind] for kind in COLUMNAR}
    assert len(lines) == 1
    assert len(columns) <= 1
    assert not lines & columns


@pytest.mark.parametrize("change", ["token", "mask", "no mask", "id", "border"])
def test_whatever_a_sample_is_shows_in_the_digest_of_columns(tmp_path: Path, change: str) -> None:
    pytest.importorskip("pyarrow")
    rows = [dict(row) for row in ROWS]
    WRITERS["parquet"](tmp_path / "before", rows)
    if change == "token":
        rows[0]["input_ids"] = [1, 2, 4]
    elif change == "mask":
        rows[0]["loss_mask"] = [1, 1, 1]
    elif change == "no mask":
        del rows[2]["loss_mask"]
    elif change == "id":
        rows[1]["id"] = "c"
    else:
        rows[1]["input_ids"], rows[2]["input_ids"], rows[2]["loss_mask"] = [4, 5], [6], [0]
    WRITERS["parquet"](tmp_path / "after", rows)
    digests = {check_input(tmp_path / name, max_tokens=10).xxh3 for name in ("before", "after")}
    assert len(digests) == 2


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_damaged_compressed_data_is_no_shorter_file(tmp_path: Path, kind: str, damage: str) -> None:
    if kind not in WRITERS:
        pytest.skip(f"nothing here writes {kind}")
    path, rows = tmp_path / "data", [{"input_ids": [n * 7919 % 5003] * (n % 9 + 1)} for n in range(5000)]
    WRITERS[kind](path, rows)
    checked = check_input(path, max_tokens=10)
    data = bytearray(path.read_bytes())
    data = data[:-6] if damage == "cut" else data[: len(data) // 2] + b"\x5a\xa5" * 4 + data[len(data) // 2 + 8 :]
    path.write_bytes(data)
    assert any("damaged" in text or "cut short" in text for text in refused(path)), refused(path)
    os.utime(path, ns=(0, 0))
    with pytest.raises(InputChangedError):
        list(read_samples(checked))


def test_a_long_zstd_window_is_read(tmp_path: Path) -> None:
    zstandard: Any = pytest.importorskip("zstandard")
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=28, enable_ldm=True)
    path = tmp_path / "data"
    path.write_bytes(zstandard.ZstdCompressor(compression_params=parameters).compress(as_lines(ROWS)))
    assert check_input(path, max_tokens=10).num_samples == 4


@pytest.mark.parametrize("kind", COLUMNAR)
def test_cut_columns_are_damaged(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "data"
    WRITERS[kind](path, ROWS * 50 if kind != "saved dataset" else [{"input_ids": [n]} for n in range(500)])
    file = next(path.glob("*.arrow")) if path.is_dir() else path
    os.truncate(file, file.stat().st_size * 2 // 3)
    assert len(refused(path)) == 1


@pytest.mark.parametrize("type_name", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
@pytest.mark.parametrize("list_name", ["list_", "large_list"])
def test_integers_and_lists_of_every_width(tmp_path: Path, type_name: str, list_name: str) -> None:
    pa: Any = pytest.importorskip("pyarrow")
    kind = getattr(pa, list_name)(getattr(pa, type_name)())
    table = pa.table({"input_ids": pa.array([[1], [2, 3], [9, 8, 7], [4]], kind)}).slice(1, 3)
    path = tmp_path / "data"
    pa.parquet = pytest.importorskip("pyarrow.parquet")
    pa.parquet.write_table(table, str(path))
    assert [s.token_ids for s in read_samples(check_input(path, max_tokens=9))] == [(2, 3), (9, 8, 7), (4,)]
    with path.open("wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    assert [s.token_ids for s in read_samples(check_input(path, max_tokens=9))] == [(2, 3), (9, 8, 7), (4,)]


def test_types_are_strict_in_columns_too(tmp_path: Path) -> None:
    pa: Any = pytest.importorskip("pyarrow")
    parquet: Any = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "data"

    def problems(**columns: Any) -> list[str]:
        parquet.write_table(pa.table(columns), str(path))
        return refused(path)

    assert problems(input_ids=[[1.0, 2.0]]) == ["line 1: input_ids[0] is a float, not an integer"]
    assert problems(input_ids=[[1, None], None, [3]]) == [
        "line 1: input_ids[1] is null, not an integer",
        "line 2: no input_ids, messages, conversations or text",
    ]
    assert problems(input_ids=[["1"]]) == ["line 1: input_ids[0] is text, not an integer"]
    assert problems(input_ids=["abc"]) == ["line 1: input_ids is text, not a list of integers"]
    assert problems(input_ids=[[1]], id=[1.5]) == ["line 1: id is a float, not text or an integer"]
    assert problems(other=[1]) == ["line 1: no input_ids, messages, conversations or text"]
    parquet.write_table(pa.table({"input_ids": [[1, 2]], "loss_mask": [[False, True]]}), str(path))
    assert next(read_samples(check_input(path, max_tokens=9))).loss_mask == (0, 1)


@pytest.mark.parametrize("kind", COLUMNAR)
def test_messages_in_columns_are_those_in_lines(tmp_path: Path, kind: str) -> None:
    """A column has every key in every row, and null where there is none; templates ask whether a key is there."""
    rows: list[Row] = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "thought": "c"}]},
        {"messages": [{"role": "user", "content": "ä"}], "id": "x"},
    ]
    found = {}
    for each in (kind, "plain"):
        WRITERS[each](tmp_path / each, rows)
        source = open_source(tmp_path / each)
        found[each] = [source.fields(raw) for _, raw in source.rows()]
    assert found[kind] == found["plain"] == rows


def test_folders_that_are_no_dataset(tmp_path: Path) -> None:
    assert "no state.json" in refused(tmp_path)[0]
    (tmp_path / "state.json").write_text("{}")
    assert "state.json is not that of a dataset" in refused(tmp_path)[0]
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../x.arrow"}]}))
    assert "outside of the folder" in refused(tmp_path)[0]
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    assert "several datasets: train, test" in refused(tmp_path)[0]


def test_a_folder_changes_when_one_of_its_files_does(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    path = tmp_path / "data"
    WRITERS["saved dataset"](path, ROWS)
    checked = check_input(path, max_tokens=10)
    assert checked.stamp == stamp_of(path)
    (path / "notes.txt").write_text("not of the dataset")
    assert checked.stamp == stamp_of(path)
    assert len(list(read_samples(checked))) == 4
    os.utime(max(path.glob("*.arrow")), ns=(0, 0))
    assert checked.stamp != stamp_of(path)
    with pytest.raises(InputChangedError):
        list(read_samples(checked))


@pytest.mark.parametrize(
    ("start", "package", "extra"),
    [
        (b"PAR1", "pyarrow", "parquet"),
        (b"ARROW1\0\0", "pyarrow", "parquet"),
        (b"\x28\xb5\x2f\xfd", "zstandard", "zstd"),
    ],
)
def test_a_package_that_is_missing_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: bytes, package: str, extra: str
) -> None:
    (tmp_path / "data").write_bytes(start + b"\0" * 20)
    for name in (package, f"{package}.parquet", "compression.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=rf"package {package} .*vllm-compat\[{extra}\]"):
        check_input(tmp_path / "data", max_tokens=10)


def test_memory_does_not_grow_with_a_compressed_file(tmp_path: Path) -> None:
    """A thousand times what a pass may hold, in one line after another."""
    tracemalloc: Any = pytest.importorskip("tracemalloc")
    path = tmp_path / "data"
    line = as_lines([{"input_ids": list(range(2000))}])
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(500):
            file.write(line)
    tracemalloc.start()
    try:
        checked = check_input(path, max_tokens=10)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert checked.num_samples == 500
    assert most < 2_000_000 < 500 * len(line)
