"""Any valid rows are read back; any one corruption is told with its line."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_compat.errors import InputError
from vllm_compat.extract.inputs import Sample, check_input, read_samples

VOCABULARY = 5000
Row = dict[str, Any]


@st.composite
def a_row(draw: st.DrawFn) -> Row:
    row: Row = {"input_ids": draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12))}
    if draw(st.booleans()):
        length = len(row["input_ids"])
        row["loss_mask"] = draw(st.lists(st.sampled_from([0, 1, False, True]), min_size=length, max_size=length))
    if draw(st.booleans()):
        row["extra"] = draw(st.none() | st.text(max_size=5) | st.dictionaries(st.text(max_size=3), st.floats(0, 1)))
    return row


@st.composite
def some_rows(draw: st.DrawFn) -> list[Row]:
    rows = draw(st.lists(a_row(), min_size=1, max_size=8))
    names = draw(st.lists(st.text(max_size=4) | st.integers(), min_size=len(rows), max_size=len(rows), unique_by=str))
    for row, name in zip(rows, names, strict=True):
        if draw(st.booleans()):
            row["id"] = name
    return rows


@st.composite
def lines_of(draw: st.DrawFn, rows: list[Row]) -> tuple[list[bytes], list[int]]:
    """The file's lines, blank ones among them, and the index of each row's line."""
    lines: list[bytes] = []
    places: list[int] = []
    for row in rows:
        lines += draw(st.lists(st.sampled_from([b"", b" ", b"\t\r"]), max_size=2))
        places.append(len(lines))
        lines.append(json.dumps(row, ensure_ascii=draw(st.booleans())).encode())
    return lines, places


def written(folder: str, lines: list[bytes], end: bytes = b"\n", start: bytes = b"") -> Path:
    path = Path(folder) / "data.jsonl"
    path.write_bytes(start + end.join(lines))
    return path


@given(st.data(), some_rows(), st.sampled_from([b"\n", b"\r\n"]), st.sampled_from([b"", b"\xef\xbb\xbf"]))
def test_valid_rows_are_read_back(data: st.DataObject, rows: list[Row], end: bytes, start: bytes) -> None:
    lines, places = data.draw(lines_of(rows))
    limit = data.draw(st.integers(1, 13))
    with tempfile.TemporaryDirectory() as folder:
        checked = check_input(written(folder, lines, end, start), max_tokens=limit, vocab_size=VOCABULARY)
        samples = list(read_samples(checked))
    assert samples == [
        Sample(
            index=index,
            line=places[index] + 1,
            id=str(row["id"]) if "id" in row else None,
            token_ids=tuple(row["input_ids"][:limit]),
            loss_mask=tuple(row["loss_mask"][:limit]) if "loss_mask" in row else None,
            truncated=len(row["input_ids"]) > limit,
        )
        for index, row in enumerate(rows)
    ]
    assert checked.num_samples == len(rows)
    assert checked.num_tokens == sum(len(s.token_ids) for s in samples)
    assert checked.num_truncated == sum(s.truncated for s in samples)


def _changed(row: Row, **values: Any) -> bytes:
    return json.dumps(row | values).encode()


@st.composite
def corrupted(draw: st.DrawFn, row: Row) -> bytes:
    """The row's line with one thing wrong."""
    ids, line = row["input_ids"], json.dumps(row).encode()
    at = draw(st.integers(0, len(ids) - 1))
    token: Any = draw(
        st.sampled_from([-1, VOCABULARY, VOCABULARY + 2**70, True, 1.0, "1", None, [1], {}, float("nan")])
    )
    kind = draw(
        st.sampled_from(["token", "no list", "empty", "gone", "mask", "mask length", "id", "json", "utf8", "key"])
    )
    if kind == "token":
        return _changed(row, input_ids=[*ids[:at], token, *ids[at + 1 :]])
    if kind == "no list":
        return _changed(row, input_ids=draw(st.sampled_from([None, 1, "1", {"0": 1}])))
    if kind == "empty":
        return _changed(row, input_ids=[], loss_mask=[])
    if kind == "gone":
        return json.dumps({name: value for name, value in row.items() if name != "input_ids"}).encode()
    if kind == "mask":
        bad = draw(st.sampled_from([2, -1, 1.0, "1", None]))
        return _changed(row, loss_mask=[*[1] * at, bad, *[1] * (len(ids) - at - 1)])
    if kind == "mask length":
        return _changed(row, loss_mask=[1] * draw(st.sampled_from([len(ids) - 1, len(ids) + 1])))
    if kind == "id":
        return _changed(row, id=draw(st.sampled_from([None, 1.5, True, [], "\udc00"])))
    if kind == "json":
        return line[: draw(st.integers(1, len(line) - 1))]
    if kind == "utf8":
        place = draw(st.integers(0, len(line)))
        return line[:place] + b"\xff" + line[place:]
    return line[:-1] + b', "input_ids": [1]}'


@given(st.data(), some_rows())
def test_any_single_corruption_is_told_with_its_line(data: st.DataObject, rows: list[Row]) -> None:
    lines, places = data.draw(lines_of(rows))
    victim = data.draw(st.integers(0, len(rows) - 1))
    lines[places[victim]] = data.draw(corrupted(rows[victim]))
    with tempfile.TemporaryDirectory() as folder, pytest.raises(InputError) as caught:
        check_input(written(folder, lines), max_tokens=5, vocab_size=VOCABULARY)
    assert {problem.line for problem in caught.value.problems} == {places[victim] + 1}


@given(st.data(), some_rows())
def test_an_id_given_twice_is_told_with_the_later_line(data: st.DataObject, rows: list[Row]) -> None:
    first = data.draw(st.integers(0, len(rows) - 1))
    later = data.draw(st.integers(first + 1, len(rows)))
    rows[first]["id"] = name = rows[first].get("id", "a name of eleven")
    rows.insert(later, {"input_ids": [1], "id": str(name) if data.draw(st.booleans()) else name})
    lines, places = data.draw(lines_of(rows))
    with tempfile.TemporaryDirectory() as folder, pytest.raises(InputError) as caught:
        check_input(written(folder, lines), max_tokens=5)
    [problem] = caught.value.problems
    assert problem.line == places[later] + 1
    assert f"also on line {places[first] + 1}" in problem
