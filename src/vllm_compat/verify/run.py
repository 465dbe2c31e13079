"""What a run says of itself, as far as verification needs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_compat._layers import parse_layer_id
from vllm_compat.errors import JournalError, UsageError
from vllm_compat.extract.model import ModelFacts, read_model_facts
from vllm_compat.extract.record import RUN_FILE, Record, read_record
from vllm_compat.extract.revision import find_revision
from vllm_compat.extract.sidecars import Sidecar
from vllm_compat.formats import Format, get_format
from vllm_compat.types import LayerId

__all__ = ["RunFacts", "open_facts"]

_OF_THE_INPUT = ("max_tokens", "vocab_size", "limit", "xxh3", "num_samples")


@dataclass(frozen=True, slots=True)
class RunFacts:
    """A run's folder and what its ``run.json`` says.

    Attributes:
        folder: the run's folder.
        complete: whether every sample is said to be done.
        format: how samples lie on disk.
        layer_ids: what was captured, in order.
        num_samples: how many samples there are, done or not.
        model: its name or folder.
        revision: which weights that was; None when not known.
        dtype: the engine's, as it was asked for.
        save_dtype: of the states on disk, as it was asked for.
        prepared_data: its input.
        generate: the most tokens of an answer; 0 where the input's tokens are all that a sample has.
        sampling: how answers were sampled.
        num_layers: decoder layers of the model; None when not known.
        sidecars: the files beside the samples as they were written; None when the run does not say.
        facts: what the model's folder says, as long as it is the run's own.
        record: all of it.
    """

    folder: Path
    complete: bool
    format: Format
    layer_ids: tuple[LayerId, ...]
    num_samples: int
    model: str
    revision: str | None
    dtype: str
    save_dtype: str
    prepared_data: Path
    generate: int
    sampling: Mapping[str, Any]
    num_layers: int | None
    sidecars: tuple[Sidecar, ...] | None
    facts: ModelFacts
    record: Record = field(repr=False)


def open_facts(folder: Path) -> RunFacts:
    """The facts of the run in a folder.

    Raises:
        UsageError: there is no run.
        JournalError: ``run.json`` cannot be understood.
        StorageError: it cannot be read.
    """
    record = read_record(folder) if folder.is_dir() else None
    if record is None:
        raise UsageError(f"{folder} has no {RUN_FILE}, so it is no run; the folder that was --output-dir is wanted")
    identity: Any = record.identity
    try:
        num_samples, revision = identity["num_samples"], identity["model_revision"]
        if type(num_samples) is not int or num_samples < 1 or not isinstance(revision, (str, type(None))):
            raise TypeError(f"num_samples {num_samples!r}, model_revision {revision!r}")
        if missing := [name for name in _OF_THE_INPUT if name not in record.input]:
            raise KeyError(missing[0])
        facts = _facts(str(identity["model"]), revision)
        return RunFacts(
            folder=folder,
            complete=record.complete,
            format=get_format(identity["format"]),
            layer_ids=tuple(parse_layer_id(str(layer_id)) for layer_id in identity["layer_ids"]),
            num_samples=num_samples,
            model=str(identity["model"]),
            revision=revision,
            dtype=str(identity["dtype"]),
            save_dtype=str(identity["save_dtype"]),
            prepared_data=Path(record.about["config"]["prepared_data"]),
            generate=int(identity.get("generate", 0)),
            sampling=dict(identity.get("sampling", {})),
            num_layers=facts.num_layers if record.num_layers is None else record.num_layers,
            sidecars=_sidecars(record),
            facts=facts,
            record=record,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise JournalError(
            f"{folder / RUN_FILE} says what no run of this release says ({error!r}); it was changed, or is of another "
            "release",
            path=str(folder / RUN_FILE),
        ) from error


def _sidecars(record: Record) -> tuple[Sidecar, ...] | None:
    told: Any = record.about.get("sidecars")
    if told is None:
        return None
    return tuple(Sidecar(str(each["file"]), int(each["bytes"]), str(each["xxh3"])) for each in told)


def _facts(model: str, revision: str | None) -> ModelFacts:
    """Nothing of a folder whose model is another now."""
    facts = read_model_facts(model)
    now = None if facts.why_unknown else find_revision(model, {})
    return (
        ModelFacts(why_unknown=f"{model} is another now") if None not in (now, revision) and now != revision else facts
    )
