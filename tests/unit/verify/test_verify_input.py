"""The input beside the run: found by itself, given, moved, changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.unit.verify.conftest import words

from vllm_compat.errors import InputError

if TYPE_CHECKING:
    from tests.unit.verify.conftest import MakeRun, Verify


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data.jsonl"


def test_an_input_that_is_gone_is_said_to_be(make_run: MakeRun, check: Verify, data: Path, tmp_path: Path) -> None:
    folder = make_run()
    moved = data.rename(tmp_path / "moved.jsonl")
    verdict = check(folder)
    assert "--prepared-data" in verdict.input_why_not
    assert (verdict.exit_code, verdict.first) == (0, ())
    assert check(folder, prepared_data=moved).input_why_not == ""
    with pytest.raises(InputError, match="no such file"):
        check(folder, prepared_data=data)


def test_an_input_that_was_changed_is_not_compared(make_run: MakeRun, check: Verify, data: Path) -> None:
    folder = make_run()
    data.write_text(data.read_text().replace('"r3"', '"r33"'))
    verdict = check(folder)
    assert "changed after the run" in verdict.input_why_not
    assert verdict.exit_code == 0
    data.write_text("{}\n")
    assert "not what it was" in check(folder).input_why_not


def test_another_input_that_is_given_is_compared_row_by_row(make_run: MakeRun, check: Verify, tmp_path: Path) -> None:
    folder = make_run()
    lines = (tmp_path / "data.jsonl").read_text().splitlines()
    row = json.loads(lines[4])
    row["input_ids"][0] += 1
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join([*lines[:4], json.dumps(row), lines[5]]))
    verdict = check(folder, prepared_data=other)
    assert verdict.exit_code == 5
    texts = words(verdict)
    assert texts[0].startswith(f"the input {other} is not the run's: xxh3 ")
    assert texts[1].startswith("sample 3, line 5 of the input, hs_3.safetensors: its tokens are not the input's")
    assert texts[2:] == [
        "sample 5, hs_5.safetensors: the input has no such row",
        "sample 6, hs_6.safetensors: the input has no such row",
    ]


def test_an_input_that_was_only_touched_is_compared(make_run: MakeRun, check: Verify, data: Path) -> None:
    folder = make_run()
    data.touch()
    assert check(folder).input_why_not == ""
