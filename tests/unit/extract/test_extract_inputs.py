"""The input file as a whole: line numbers, the cut, ids, and a file that changes."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from vllm_compat.errors import InputError
from vllm_compat.extract.inputs import MAX_KEPT_PROBLEMS, InputChangedError, Sample, check_input, read_samples
from vllm_compat.extract.rows import parse_line

if TYPE_CHECKING:
    from tests.unit.extract.conftest import WriteRows


def refused(path: Path, vocab_size: int | None = None) -> InputError:
    with pytest.raises(InputError) as caught:
        check_input(path, max_tokens=10, vocab_size=vocab_size)
    assert caught.value.exit_code == 4
    return caught.value


def test_samples_are_read_back(write_rows: WriteRows) -> None:
    path = write_rows([{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "id": "a"}, {"input_ids": [4]}])
    checked = check_input(path, max_tokens=2)
    assert list(read_samples(checked)) == [
        Sample(0, 1, "a", (1, 2), (0, 1), True),
        Sample(1, 2, None, (4,), None, False),
    ]
    assert (checked.num_samples, checked.num_tokens, checked.num_truncated, checked.longest) == (2, 3, 1, 2)
    assert checked.highest == (4, 2)


def test_a_sample_of_just_the_limit_is_not_cut(write_rows: WriteRows) -> None:
    checked = check_input(write_rows([{"input_ids": [1, 2]}]), max_tokens=2)
    assert checked.num_truncated == 0
    assert not next(read_samples(checked)).truncated


def test_bom_crlf_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"input_ids": [1]}\r\n\r\n  \n{"input_ids": [2]}\r\n\n{"input_ids": [3]}')
    samples = list(read_samples(check_input(path, max_tokens=10)))
    assert [(s.index, s.line, s.token_ids) for s in samples] == [(0, 1, (1,)), (1, 4, (2,)), (2, 6, (3,))]


def test_a_bom_within_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"input_ids": [1]}\n\xef\xbb\xbf{"input_ids": [1]}\n')
    assert [p.line for p in refused(path).problems] == [2]


def test_all_problems_are_collected_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\n{"input_ids": []}\n{"input_ids": [1]}\n\n{"input_ids": [7]}\n\xff\n')
    error = refused(path, vocab_size=7)
    assert [p.line for p in error.problems] == [2, 5, 6]
    assert "line 5: input_ids[0] is 7" in str(error)


def test_ids_are_unique_also_as_number_and_text(write_rows: WriteRows) -> None:
    rows = [{"input_ids": [1], "id": name} for name in ("a", 1, "b", "1", "a")]
    error = refused(write_rows(rows))
    assert [p.line for p in error.problems] == [4, 5]
    assert "'1' is also on line 2" in error.problems[0]


def test_problems_beyond_the_kept_ones_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("{}\n" * (MAX_KEPT_PROBLEMS + 7))
    error = refused(path)
    assert len(error.problems) == MAX_KEPT_PROBLEMS + 1
    assert f"{MAX_KEPT_PROBLEMS + 7} problems were found" in str(error)
    assert error.problems[-1].line == MAX_KEPT_PROBLEMS


@pytest.mark.parametrize("content", [b"", b"\n \r\n", b"\xef\xbb\xbf"])
def test_a_file_without_samples(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    assert "no sample" in str(refused(path))


def test_files_that_cannot_be_read_twice(tmp_path: Path) -> None:
    assert "cannot be read" in str(refused(tmp_path / "missing.jsonl"))
    assert "not a regular file" in str(refused(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in str(refused(tmp_path / "pipe"))


def test_num_samples_reads_no_further(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"input_ids": [1]}\n\n{"input_ids": [2]}\nnonsense\n')
    checked = check_input(path, max_tokens=10, num_samples=2)
    assert [s.token_ids for s in read_samples(checked)] == [(1,), (2,)]
    assert checked.num_samples == 2


def test_a_file_that_changed_between_the_passes(write_rows: WriteRows) -> None:
    path = write_rows([{"input_ids": [1]}, {"input_ids": [2]}])
    checked = check_input(path, max_tokens=10)
    write_rows([{"input_ids": [1]}, {"input_ids": [3]}])
    with pytest.raises(InputChangedError, match="changed after it was checked") as caught:
        next(read_samples(checked))
    assert caught.value.exit_code == 4
    assert "nothing was started" not in str(caught.value)


@pytest.mark.parametrize("change", ["touch", "grow", "replace", "remove"])
def test_a_file_that_changes_during_the_second_pass(write_rows: WriteRows, change: str) -> None:
    path = write_rows([{"input_ids": [1]}, {"input_ids": [2]}])
    checked = check_input(path, max_tokens=10)
    samples = read_samples(checked)
    assert next(samples).token_ids == (1,)
    before = path.stat()
    if change == "touch":
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    elif change == "grow":
        with path.open("a") as file:
            file.write(json.dumps({"input_ids": [3]}))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    elif change == "replace":
        other = path.with_name("other.jsonl")
        other.write_bytes(path.read_bytes())
        os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
        other.replace(path)
    else:
        path.unlink()
    with pytest.raises(InputChangedError):
        next(samples)


def test_a_file_that_ends_early_in_the_second_pass(write_rows: WriteRows) -> None:
    checked = check_input(write_rows([{"input_ids": [1]}]), max_tokens=10)
    with pytest.raises(InputChangedError):
        list(read_samples(dataclasses.replace(checked, num_samples=2)))


def test_a_file_that_changes_while_it_is_checked(write_rows: WriteRows, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_rows([{"input_ids": [1]}])

    def touching(raw: bytes) -> object:
        os.utime(path, ns=(0, 0))
        return parse_line(raw)

    monkeypatch.setattr("vllm_compat.extract.inputs.jsonl.parse_line", touching)
    assert "changed while it was read" in str(refused(path))


def test_samples_are_read_one_at_a_time(write_rows: WriteRows, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = check_input(write_rows([{"input_ids": [n]} for n in range(50)]), max_tokens=10)
    parsed: list[bytes] = []

    def counted(raw: bytes) -> object:
        parsed.append(raw)
        return parse_line(raw)

    monkeypatch.setattr("vllm_compat.extract.inputs.jsonl.parse_line", counted)
    samples = read_samples(checked)
    next(samples)
    next(samples)
    assert len(parsed) == 2
