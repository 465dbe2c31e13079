"""What ``run.json`` says, and what lies beside the samples, against what is there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from vllm_compat.extract.record import RUN_FILE
from vllm_compat.extract.sidecars import Sidecar, look_at
from vllm_compat.formats.draft import DRAFT_CONFIG, draft_config
from vllm_compat.verify.problems import Problem, Problems
from vllm_compat.verify.run import RunFacts

__all__ = ["check_record", "check_sidecars"]

_GONE = "it is gone; the run wrote it when it was complete"


def check_record(run: RunFacts, found: Mapping[str, int], problems: Problems) -> None:
    """Compare what a complete run says at its end, but for the sidecars.

    Args:
        run: the run.
        found: ``samples``, ``skipped``, ``tokens`` and ``bytes`` by the journals.
        problems: gets what differs.
    """
    record: Any = run.record
    said = {"num_samples": run.num_samples, "xxh3": record.identity.get("input_xxh3")}
    for name, value in said.items():
        if record.input.get(name) != value:
            what = f"identity says {name} {value!r}, input says {record.input.get(name)!r}"
            problems.add(Problem(what, file=RUN_FILE))
    if run.complete:
        summary: Any = record.about.get("summary") or {}
        whole = found["samples"] == run.num_samples  # samples that are missing have been named
        for name, value in found.items() if whole else ():
            if summary.get(name) != value:
                what = f"its summary says {name} {summary.get(name)!r}, the journals have {value}"
                problems.add(Problem(what, file=RUN_FILE))


def check_sidecars(run: RunFacts, problems: Problems, *, all_of_them: bool) -> None:
    """Read what lies beside the samples of a complete run; each file that is not what was written is a problem.

    Args:
        run: the run.
        problems: gets them.
        all_of_them: not only the draft model's snippet.
    """
    if not run.complete:
        return
    wrong = _in_draft_config(run)
    for sidecar in (run.sidecars or ()) if all_of_them else ():
        wrong.setdefault(sidecar.file, _in_file(run, sidecar))
    for name, what in wrong.items():
        if what:
            problems.add(Problem(what, file=name))


def _in_file(run: RunFacts, written: Sidecar) -> str:
    """What is wrong with a file; empty when nothing is."""
    try:
        found = look_at(run.folder, written.file)
    except FileNotFoundError:
        return _GONE
    except OSError as error:
        return f"it cannot be read: {error.strerror or error}"
    if found.bytes != written.bytes:
        return f"it has {found.bytes} bytes, {written.bytes} were written"
    if found.xxh3 != written.xxh3:
        return f"it is not what was written: its xxh3 is {found.xxh3}, {written.xxh3} was written"
    return ""


def _in_draft_config(run: RunFacts) -> dict[str, str]:
    """What is wrong with the draft model's snippet, where the model's depth is known; it is known by its contents."""
    wanted = {} if run.num_layers is None else draft_config(run.layer_ids, run.num_layers)
    if not wanted:
        return {}
    try:
        found = json.loads((run.folder / DRAFT_CONFIG).read_bytes())
    except FileNotFoundError:
        return {DRAFT_CONFIG: _GONE}
    except (OSError, ValueError) as error:
        return {DRAFT_CONFIG: f"it cannot be read: {error}"}
    if found != wanted:
        return {DRAFT_CONFIG: f"it says {json.dumps(found)}, wanted {json.dumps(wanted)}"}
    return {}
