"""The turns: each case once in a turn, each time in a fresh process, in the other order every second turn."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.bench import machine
from benchmarks.bench.cases import PLAIN
from benchmarks.bench.settings import Settings
from benchmarks.bench.turn import RESULT

__all__ = ["Turns", "alternate"]

_ROOT = Path(__file__).parents[2]
_ERROR = re.compile(r"\b\w+(?:Error|Exception): .+")
_ELSEWHERE = ("See stack trace", "See root cause", "EngineDeadError", "Engine core initialization failed")
_LINES = 15  # of a log, when a process ended without a word


@dataclass(slots=True)
class Turns:
    """What came of them.

    Attributes:
        done: each with ``turn``, ``case``, the figures, and ``load_average`` before it.
        not_available: case -> why this vLLM or this machine has it not.
        failed: case -> the error.
    """

    done: list[dict[str, Any]] = field(default_factory=list)
    not_available: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def alternate(
    settings: Settings, cases: Sequence[str], turns: int, folder: Path, limit: float, keep: Callable[[Turns], object]
) -> None:
    """Run them.

    Args:
        settings: of every case.
        cases: names; plain ones go first, so that every other one's neighbours are as near to them as can be.
        turns: how often each.
        folder: has ``prompts.json``; logs and files go here.
        limit: seconds for one process.
        keep: told what came of all so far, after each process, so that nothing is lost to a run that is ended early.
    """
    settings.write(folder / "settings.json")
    order = [name for name in PLAIN if name in cases] + [name for name in cases if name not in PLAIN]
    found = Turns()
    for turn in range(turns):
        for name in order if turn % 2 == 0 else reversed(order):
            if name in found.not_available or name in found.failed:
                continue
            before = machine.load_average()
            log = folder / f"{turn}-{name}.log"
            result = _run(name, folder, log, limit)
            if why := result.get("not_available"):
                why = found.not_available[name] = _in_full(why, log)
                print(f"turn {turn}: {name}: not available: {why}", flush=True)
            elif why := result.get("error"):
                why = found.failed[name] = _in_full(why, log)
                print(f"turn {turn}: {name}: failed: {why}", flush=True)
            else:
                speed = result["tokens"] / result["seconds"]
                found.done.append(
                    {
                        "turn": turn,
                        "case": name,
                        "tokens_per_second": round(speed, 1),
                        **{k: round(v, 3) if isinstance(v, float) else v for k, v in result.items() if k != "facts"},
                        **result["facts"],
                        "load_average": before,
                    }
                )
                print(f"turn {turn}: {name}: {speed:.1f} tokens/s, {result['seconds']:.1f} s", flush=True)
            keep(found)


def _run(name: str, folder: Path, log: Path, limit: float) -> dict[str, Any]:
    shutil.rmtree(folder / "files", ignore_errors=True)
    (folder / RESULT).unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.bench.turn", name, str(folder)]
    with (
        log.open("w", encoding="utf-8") as out,
        subprocess.Popen(command, cwd=_ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True) as process,
    ):
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {limit:.0f} s"}
        finally:
            _end(process)
    if (folder / RESULT).exists():
        result: dict[str, Any] = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        return result
    tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LINES:]
    return {"error": f"exit code {process.returncode}; " + " | ".join(tail)}


def _in_full(why: str, log: Path) -> str:
    """What a process said, with the cause where an engine of several processes only points to its log; no paths."""
    if any(words in why for words in _ELSEWHERE):
        errors = _ERROR.findall(log.read_text(encoding="utf-8", errors="replace"))
        causes = [error for error in errors if not any(words in error for words in _ELSEWHERE)]
        why = f"{why} Its log ends with {causes[-1]}" if causes else why
    for path, name in ((str(log.parent), "OUTPUT"), (sys.prefix, "ENVIRONMENT"), (str(_ROOT), "REPOSITORY")):
        why = why.replace(path, name)
    return why


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and its workers: none may run beside the next turn."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
