"""What one verification is asked to do."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from vllm_compat.errors import UsageError

__all__ = ["VerifyConfig"]

_MOST_JOBS = 8


@dataclass(frozen=True, slots=True)
class VerifyConfig:
    """What one verification is asked to do; checked when made.

    Attributes:
        folder: the run's folder.
        prepared_data: the run's input; None for the file that its record names.
        jobs: threads that read; None for as many as there are cores, 8 at most.
        model: a folder, or a name of the hub, that samples are computed again with; None to leave that out.
        samples: how many samples are taken at random, for computing again and for the self-check; None for 4 and all.
        seed: of the choice.
        scan: read every file; otherwise those of the samples that are taken.
        bound: what the typical error of a layer may be; None for the one that the run's dtypes allow.
        device: where torch computes.
        trust_remote_code: let the model bring its own code.
        picture: where a picture of the comparison goes; None for none.
        partial: a run that is sound and not complete is no failure.

    Raises:
        UsageError: a value that cannot mean anything.
    """

    folder: Path
    prepared_data: Path | None = None
    jobs: int | None = None
    model: str | None = None
    samples: int | None = None
    seed: int = 0
    scan: bool = True
    bound: float | None = None
    device: str = "cpu"
    trust_remote_code: bool = False
    picture: Path | None = None
    partial: bool = False

    def __post_init__(self) -> None:
        for name in ("jobs", "samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, found {value}")
        if self.bound is not None and not 0 < self.bound < 1:
            raise UsageError(f"bound must be above 0 and below 1, found {self.bound}")
        if self.picture and self.model is None:
            raise UsageError("a picture shows samples that are computed again; give a model for that, too")

    @property
    def threads(self) -> int:
        """How many threads read."""
        return self.jobs or min(_MOST_JOBS, os.cpu_count() or 1)

    @property
    def chooses(self) -> bool:
        """Whether samples are taken at random."""
        return self.model is not None or self.samples is not None or not self.scan
