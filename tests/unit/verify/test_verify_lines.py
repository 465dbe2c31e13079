"""Journals that are torn, changed, or name a sample twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.unit.verify.conftest import words
from tests.unit.verify.test_verify_scan import JOURNAL, entries, write_journal

from vllm_compat.extract.journal import Entry, encode_entry

if TYPE_CHECKING:
    from tests.unit.verify.conftest import MakeRun, Verify


def under_way(folder: Path, keep: int) -> None:
    """The same run as it was after its first samples."""
    found = dict(list(entries(folder).items())[:keep])
    write_journal(folder, found)
    for path in folder.iterdir():
        if path.suffix in (".safetensors", ".pt") and path.name not in {entry.file for entry in found.values()}:
            path.unlink()
    record = json.loads((folder / "run.json").read_text())
    record["complete"] = False
    del record["summary"]
    (folder / "run.json").write_text(json.dumps(record))


def test_a_run_under_way_is_sound_and_not_complete(make_run: MakeRun, check: Verify) -> None:
    folder = make_run()
    under_way(folder, 4)
    verdict = check(folder)
    assert words(verdict) == []
    assert (verdict.exit_code, verdict.complete, verdict.scan.done) == (75, False, 4)
    assert check(folder, partial=True).exit_code == 0


def test_what_a_crash_leaves_is_no_problem_of_a_run_under_way(make_run: MakeRun, check: Verify) -> None:
    folder = make_run()
    whole = (folder / JOURNAL).read_bytes()
    under_way(folder, 4)
    with (folder / JOURNAL).open("ab") as file:
        file.write(whole.splitlines()[4][:30])
    owed = next(i for i in range(7) if i not in entries(folder))
    (folder / f"hs_{owed}.safetensors").write_bytes(b"no line of it yet")
    (folder / ".hs_6.tmp-0-of-1-0123abcd").write_bytes(b"x")
    verdict = check(folder)
    assert words(verdict) == []
    assert (verdict.exit_code, verdict.scan.torn, verdict.scan.unfinished) == (75, (JOURNAL,), 2)


def test_a_file_that_is_named_by_its_id_may_be_owed(model_run: MakeRun, check: Verify) -> None:
    pytest.importorskip("transformers")
    folder = model_run("llama", (0, 1, 2, "norm"), rows=3, format="modelopt")
    under_way(folder, 2)
    owed = next(i for i in range(3) if i not in entries(folder))
    (folder / f"r{owed}.pt").write_bytes(b"no line of it yet")
    verdict = check(folder)
    assert (words(verdict), verdict.exit_code, verdict.scan.unfinished) == ([], 75, 1)


def test_a_foreign_sample_is_one_in_a_run_under_way_too(make_run: MakeRun, check: Verify) -> None:
    folder = make_run()
    under_way(folder, 4)
    (folder / "hs_7.safetensors").write_bytes(b"x")
    assert check(folder).exit_code == 5


def test_a_torn_journal_of_a_complete_run_is_a_problem(make_run: MakeRun, check: Verify) -> None:
    folder = make_run()
    path = folder / JOURNAL
    path.write_bytes(path.read_bytes()[:-3])
    texts = words(check(folder))
    assert texts[0] == f"{JOURNAL}, line 7: it is not what was written: its checksum is wrong"
    assert "it is missing" in texts[1]


def test_a_bad_line_is_named_and_the_rest_is_read(make_run: MakeRun, check: Verify) -> None:
    folder = make_run()
    lines = (folder / JOURNAL).read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b'"tokens":', b'"tokenz":')
    (folder / JOURNAL).write_bytes(b"".join(lines))
    verdict = check(folder)
    assert words(verdict)[0] == f"{JOURNAL}, line 3: it is not what was written: its checksum is wrong"
    assert "it is missing" in words(verdict)[1]
    assert verdict.scan.good == 6


def test_a_line_of_another_run_and_one_that_is_there_twice(make_run: MakeRun, check: Verify) -> None:
    folder = make_run()
    found = entries(folder)
    with (folder / JOURNAL).open("ab") as file:
        file.write(encode_entry(found[2]))
        file.write(encode_entry(Entry(7, "hs_7.safetensors", 1, "0" * 16, 1, 1)))
    texts = words(check(folder))
    assert texts[1] == f"sample 2, hs_2.safetensors: the journals have it twice; the later line is 8 of {JOURNAL}"
    assert texts[0] == f"{JOURNAL}, line 9: it names a sample of another run: there are 7 here, from 0"


def test_a_sample_that_was_made_again_counts_once(make_run: MakeRun, check: Verify) -> None:
    folder = make_run()
    (folder / "hs_2.safetensors").unlink()
    make_run()
    assert entries(folder)[2].again == 1
    verdict = check(folder)
    assert (words(verdict), verdict.exit_code, verdict.scan.read) == ([], 0, 7)


def test_shards_are_one_run(make_run: MakeRun, check: Verify) -> None:
    folder = make_run(shard=(0, 2))
    assert check(folder).exit_code == 75
    make_run(shard=(1, 2))
    verdict = check(folder)
    assert (words(verdict), verdict.exit_code, verdict.scan.good) == ([], 0, 7)
