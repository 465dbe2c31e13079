"""Whether a run can check itself: which of its layers lead to the logits, and the end of its model."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from vllm_compat.extract.model import NAMES
from vllm_compat.types import NORM
from vllm_compat.verify.checkpoint import Checkpoint, CheckpointError
from vllm_compat.verify.head import Head, load_head
from vllm_compat.verify.run import RunFacts
from vllm_compat.verify.selfcheck import End

__all__ = ["find_ends"]


def find_ends(run: RunFacts, folder: Path, device: str) -> tuple[Head, tuple[End, ...]]:
    """The end of the model in a folder, and the run's layers that lead there.

    Args:
        run: the run.
        folder: its model's.
        device: where torch computes.

    Raises:
        CheckpointError: the run cannot check itself; why.
    """
    if find_spec("torch") is None:
        raise CheckpointError("it takes torch, which is not installed")
    checkpoint = Checkpoint(folder)
    num_layers = checkpoint.number(*NAMES["num_layers"])
    if num_layers is None:
        raise CheckpointError(f"{folder / 'config.json'} has none of {', '.join(NAMES['num_layers'])}")
    places = [at for at, layer_id in enumerate(run.layer_ids) if layer_id in (num_layers - 1, NORM)]
    if not places:
        raise CheckpointError(f"the run has neither the last layer, {num_layers - 1}, nor `{NORM}`")
    ends = tuple(End(run.layer_ids[at], at, number) for number, at in enumerate(places))
    return load_head(checkpoint, device), ends
