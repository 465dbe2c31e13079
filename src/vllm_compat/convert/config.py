"""What one conversion is asked to do."""

from __future__ import annotations

import os
from dataclasses import dataclass

from vllm_compat.errors import UsageError
from vllm_compat.types import LayerId

__all__ = ["ConvertConfig"]


@dataclass(frozen=True, slots=True)
class ConvertConfig:
    """What one conversion is asked to do; checked when made.

    Attributes:
        run_dir: the folder of an extraction, or of an earlier conversion.
        output_dir: where the result goes; made when missing. A conversion that is there goes on.
        format: how its samples lie on disk; a name of ``vllm_compat.formats.FORMATS``.
        layer_ids: the layers that it has, in order; None for those of the run.
        model: the model's folder, for ``norm`` of a run that has the last layer only; its ``config.json`` also says how
            many layers there are, where the run's own model is out of reach.
        partial: take a run that is not complete: what is done of it.

    Raises:
        UsageError: no layer ids, or an id there twice.
    """

    run_dir: str | os.PathLike[str]
    output_dir: str | os.PathLike[str]
    format: str
    layer_ids: tuple[LayerId, ...] | None = None
    model: str | None = None
    partial: bool = False

    def __post_init__(self) -> None:
        if self.layer_ids is not None and not self.layer_ids:
            raise UsageError("layer_ids is empty: nothing would be left. Leave it out for the layers of the run")
        if self.layer_ids is not None and len(set(self.layer_ids)) < len(self.layer_ids):
            raise UsageError(f"layer ids {' '.join(map(str, self.layer_ids))}: one is there twice")
