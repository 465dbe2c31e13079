"""The same rows in a file of any kind are the same samples, and have the same problems."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.extract.input_files import WRITERS, Row

from vllm_compat.errors import InputError
from vllm_compat.extract.config import OVERLONG, Overlong
from vllm_compat.extract.inputs import check_input, read_samples

VOCABULARY = 300


@st.composite
def a_row(draw: st.DrawFn, wrong: bool) -> Row:
    least, most = (-1, VOCABULARY) if wrong else (0, VOCABULARY - 1)
    row: Row = {"input_ids": draw(st.lists(st.integers(least, most), min_size=not wrong, max_size=9))}
    if draw(st.booleans()):
        length = max(0, len(row["input_ids"]) - (wrong and draw(st.booleans())))
        row["loss_mask"] = draw(st.lists(st.integers(0, 2 if wrong else 1), min_size=length, max_size=length))
    return row


@st.composite
def some_rows(draw: st.DrawFn) -> list[Row]:
    wrong = draw(st.booleans())
    rows = draw(st.lists(a_row(wrong), min_size=1, max_size=7))
    names: st.SearchStrategy[Any] = st.text(max_size=3) if draw(st.booleans()) else st.integers(-5, 99)
    given = draw(st.lists(names, min_size=len(rows), max_size=len(rows), unique=not wrong))
    for row, name in zip(rows, given, strict=True):
        if draw(st.booleans()):
            row["id"] = name
    return rows


@settings(max_examples=25, deadline=None)
@given(some_rows(), st.integers(1, 9), st.sampled_from(OVERLONG), st.integers(1, 9))
def test_kinds_do_not_differ(rows: list[Row], max_tokens: int, overlong: Overlong, first: int) -> None:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        for kind, write in WRITERS.items():
            path = Path(name) / kind
            write(path, rows)
            try:
                checked = check_input(
                    path,
                    max_tokens=max_tokens,
                    vocab_size=VOCABULARY,
                    num_samples=first,
                    overlong=overlong,
                    find_duplicates=True,
                )
            except InputError as error:
                found[kind] = error.problems
                continue
            same = dataclasses.replace(checked, path=Path(), stamp=(0, 0, 0), xxh3="", duplicates=None)
            groups = [(n, list(members)) for n, members in checked.duplicates.groups()] if checked.duplicates else []
            found[kind] = (same, groups, list(read_samples(checked)), list(read_samples(checked, lambda i: i % 2 == 1)))
    assert len({repr(each) for each in found.values()}) == 1, found
    assert all(each == found["plain"] for each in found.values())
