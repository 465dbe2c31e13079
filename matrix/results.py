"""What a run of the live suite on one release came to, read from the files it left."""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["Result", "as_json", "as_markdown", "read_result", "record"]

Outcome = Literal["passed", "failed", "not installable", "no CPU build"]


@dataclass(frozen=True, slots=True)
class Result:
    """One release.

    Attributes:
        release: of vLLM.
        outcome: ``not installable`` where the tests never started, ``no CPU build`` where there is nothing to install.
        tests: name of an outcome -> how many tests had it; empty where the tests never started or never ended.
        skipped: why -> how many tests were skipped for it.
        why: the first failure, in one line; empty where all is well.
        seconds: wall clock, installation included.
        partial: only some of the suite was asked for, so that nothing is proven.
    """

    release: str
    outcome: Outcome
    tests: dict[str, int]
    skipped: dict[str, int]
    why: str
    seconds: int
    partial: bool

    @property
    def passed(self) -> bool:
        """Nothing failed, and something passed."""
        return self.outcome == "passed"

    @property
    def good(self) -> bool:
        """Nothing that could be run failed."""
        return self.outcome in ("passed", "no CPU build")

    @property
    def counts(self) -> str:
        """``54 passed, 2 skipped``."""
        return ", ".join(f"{number} {name}" for name, number in self.tests.items() if number)


def read_result(release: str, report: Path, code: int, seconds: int) -> Result:
    """The result of ``live(release)``: the files it left in ``report``, and its exit code (negative: a signal)."""
    log = report / f"{release}.log"
    junit = report / f"{release}.xml"
    packages = report / f"{release}.packages"
    tests, skipped, first = _read_junit(junit) if junit.exists() else ({}, {}, "")
    partial = (report / f"{release}.partial").exists()
    if not packages.exists():
        outcome: Outcome = "not installable"
    else:
        outcome = "passed" if code == 0 and tests.get("passed") else "failed"
    why = "" if outcome == "passed" else first or _last_words(log, code)
    return Result(release, outcome, tests, skipped, why, seconds, partial)


def _read_junit(path: Path) -> tuple[dict[str, int], dict[str, int], str]:
    tests = {"passed": 0, "failed": 0, "skipped": 0}
    skipped: dict[str, int] = {}
    first = ""
    for case in ET.parse(path).iter("testcase"):
        kind = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        name = {"failure": "failed", "error": "failed"}.get(kind, kind)
        tests[name] += 1
        if name == "passed":
            continue
        words = _line((case.find(kind) or case[0]).get("message", ""))
        if name == "skipped":
            skipped[words] = skipped.get(words, 0) + 1
        else:
            first = first or f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}: {words}"
    return tests, skipped, first


_TELLING = re.compile(r"error|no solution|×|╰|killed|fatal|segmentation|not found", re.IGNORECASE)


def _last_words(log: Path, code: int) -> str:
    """The last line of a log that tells something; its colours and frames are left out."""
    lines = [_line(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in log.read_text(errors="replace").splitlines()]
    told = [line for line in lines if _TELLING.search(line) and not line.startswith("nox > Session")]
    ended = "ran out of time" if code == -9 else f"exit code {code}"
    return f"{told[-1]} ({ended})" if told else ended


def _line(text: str, most: int = 200) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


def as_markdown(results: Sequence[Result], day: datetime.date) -> str:
    """The table, and below it what was skipped and why."""
    head = [f"Live suite, CPU builds, {day}", "", "| vLLM | outcome | tests | why | s |", "|---|---|---|---|---|"]
    rows = [
        f"| {r.release} | {r.outcome}{', in part' if r.partial else ''} | {r.counts} | {r.why.replace('|', '/')} "
        f"| {r.seconds} |"
        for r in results
    ]
    skipped = [f"- {r.release}: {number} × {why}" for r in results for why, number in r.skipped.items()]
    return "\n".join([*head, *rows, *(["", "Skipped:", "", *skipped] if skipped else []), ""])


def as_json(results: Sequence[Result], day: datetime.date) -> str:
    """The same for programs."""
    return json.dumps({"date": str(day), "results": [dataclasses.asdict(r) for r in results]}, indent=2) + "\n"


def record(table: Path, results: Iterable[Result], day: datetime.date) -> None:
    """Write ``day`` as `proven.cpu` of every release that passed whole, or `proven.mixture` where that is what ran.

    Everything else in the file stays as it is.
    """
    passed = {r.release for r in results if r.passed and not r.partial}
    head, *rows = re.split(r"^(?=\[\[release\]\])", table.read_text(encoding="utf-8"), flags=re.MULTILINE)
    table.write_text(head + "".join(_proven(row, day) if _release(row) in passed else row for row in rows), "utf-8")


def _release(row: str) -> str:
    found = re.search(r'^vllm = "(.+?)"', row, re.MULTILINE)
    return found[1] if found else ""


def _proven(row: str, day: datetime.date) -> str:
    """The text of a row with its day. tomlkit, which would keep the rest too, writes inline tables without spaces."""
    how = "mixture" if re.search(r"^mixture = ", row, re.MULTILINE) else "cpu"
    line = re.compile(r"^proven = \{ (.*) \}$", re.MULTILINE)
    if not line.search(row):
        return re.sub(r"^(vllm = .*\n)", rf"\1proven = {{ {how} = {day} }}\n", row, count=1, flags=re.MULTILINE)
    kept = [proof for proof in line.findall(row)[0].split(", ") if not proof.startswith(f"{how} = ")]
    at = 1 if kept and kept[0].startswith("surface") else 0
    return line.sub(f"proven = {{ {', '.join([*kept[:at], f'{how} = {day}', *kept[at:]])} }}", row)
