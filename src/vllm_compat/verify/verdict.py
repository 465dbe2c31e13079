"""What a verification found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from vllm_compat.verify.compare import Recomputed
from vllm_compat.verify.problems import Problem
from vllm_compat.verify.run import RunFacts
from vllm_compat.verify.scan import Scan
from vllm_compat.verify.selfcheck import SelfCheckResult

__all__ = ["Verdict"]

_GOOD, _UNREADABLE, _WRONG, _INCOMPLETE = 0, 4, 5, 75


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """What a verification found.

    Attributes:
        run: what was looked at.
        scan: what reading it showed.
        scanned: whether all of it was read.
        complete: whether every sample is done, and the run says so.
        partial: whether it need not be.
        input_path: the run's input.
        input_why_not: why it was not compared; empty when it was.
        self_checks: one for each layer that leads to the logits.
        self_check_why_not: why there is none.
        recomputed: the comparison with the reference; None when there is none.
        recomputed_why_not: why not; empty when it was not asked for.
        notes: what a reader should know, and is nothing wrong.
        num_problems: everything that is wrong.
        num_bad_samples: samples that something is wrong with.
        first: the first of the problems, those of the run as a whole before those of samples.
    """

    run: RunFacts
    scan: Scan
    scanned: bool
    complete: bool
    partial: bool
    input_path: str
    input_why_not: str
    self_checks: tuple[SelfCheckResult, ...]
    self_check_why_not: str
    recomputed: Recomputed | None
    recomputed_why_not: str
    notes: tuple[str, ...]
    num_problems: int
    num_bad_samples: int
    first: tuple[Problem, ...]

    @property
    def exit_code(self) -> int:
        """0 good, 4 for a model of which nothing can be said, 5 something is wrong, 75 not complete."""
        if self.num_problems:
            return _WRONG
        if self.recomputed_why_not and not self.self_checks:
            return _UNREADABLE
        return _GOOD if self.complete or self.partial else _INCOMPLETE

    def as_dict(self) -> dict[str, Any]:
        """In plain types, for JSON; the problems are elsewhere."""
        again = self.recomputed
        layers = [{**asdict(r), "looks": again.diagnose(r)} for r in again.layers] if again else []
        return {
            "exit_code": self.exit_code,
            "complete": self.complete,
            "num_problems": self.num_problems,
            "num_bad_samples": self.num_bad_samples,
            "num_samples": self.run.num_samples,
            "format": self.run.format.name,
            "layer_ids": self.run.layer_ids,
            "scan": {**asdict(self.scan), "everything": self.scanned},
            "input": {"path": self.input_path, "why_not_compared": self.input_why_not},
            "self_checks": [asdict(check) for check in self.self_checks],
            "self_check_why_not": self.self_check_why_not,
            "recomputed": {
                "samples": again.samples if again else (),
                "layers": layers,
                "why_not": self.recomputed_why_not,
            },
            "notes": self.notes,
        }
