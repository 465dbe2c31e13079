"""What ``run.json`` and the sidecar of all formats say, against what is there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from vllm_compat.extract.record import RUN_FILE
from vllm_compat.formats.draft import DRAFT_CONFIG, draft_config
from vllm_compat.verify.problems import Problem, Problems
from vllm_compat.verify.run import RunFacts

__all__ = ["check_record"]


def check_record(run: RunFacts, found: Mapping[str, int], problems: Problems) -> None:
    """Compare what a complete run says at its end.

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
        _check_draft_config(run, problems)


def _check_draft_config(run: RunFacts, problems: Problems) -> None:
    """The draft model's snippet, where the model's depth is known."""
    num_layers = run.facts.num_layers
    wanted = draft_config(run.layer_ids, num_layers) if num_layers is not None else {}
    if not wanted:
        return
    try:
        found = json.loads((run.folder / DRAFT_CONFIG).read_bytes())
    except FileNotFoundError:
        problems.add(Problem("it is gone; the run wrote it when it was complete", file=DRAFT_CONFIG))
    except (OSError, ValueError) as error:
        problems.add(Problem(f"it cannot be read: {error}", file=DRAFT_CONFIG))
    else:
        if found != wanted:
            problems.add(Problem(f"it says {json.dumps(found)}, wanted {json.dumps(wanted)}", file=DRAFT_CONFIG))
