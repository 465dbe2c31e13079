"""What a run says of itself: ``run.json`` in its folder, there from the start, and complete at the end."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import vllm_compat
from vllm_compat._detect.installed import find_installed
from vllm_compat.errors import JournalError
from vllm_compat.extract.config import ExtractConfig
from vllm_compat.extract.done import Done
from vllm_compat.extract.files import storage, write_whole
from vllm_compat.extract.inputs import CheckedInput, TokenizerSource, stamp_of
from vllm_compat.extract.sidecars import Sidecar

__all__ = [
    "RUN_FILE",
    "Effort",
    "Record",
    "Summary",
    "read_record",
    "record_of",
    "sealed",
    "unsealed",
    "versions",
    "write_record",
]

RUN_FILE = "run.json"
_OF_THE_SEAL = ("summary", "skipped", "sidecars")


@dataclass(frozen=True, slots=True)
class Effort:
    """What one process did.

    Attributes:
        tokens: of the samples that it did.
        seconds: from the first request to the last file; loading the model is not in it.
        stalled: of these, what the engine waited for the writers.
        copied: samples that were made from the file of another with the same tokens.
    """

    tokens: int = 0
    seconds: float = 0.0
    stalled: float = 0.0
    copied: int = 0

    def __add__(self, other: Effort) -> Effort:
        """Both, one after the other."""
        mine, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return Effort(*(a + b for a, b in zip(mine, theirs, strict=True)))


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run has done, and what this process did for it.

    Attributes:
        samples: samples that are done, by whatever process, skipped ones too.
        tokens: tokens of those that have a file.
        bytes: size of their files.
        seconds: of this process, from its first request to its last file; loading the model is not in it.
        truncated: samples of the input that lose tokens.
        tokens_per_second: of this process.
        output_dir: where the files are.
        complete: whether all samples are done and the run is sealed; False when other shards are still at it.
        kept: of ``samples``, those that were done before this process began.
        skipped: of ``samples``, those without a file, because their states were not finite or their tokens too many.
        stalled: of ``seconds``, what the engine waited for the writers.
        overlong: samples of the input that are left out because they have too many tokens.
        copied: samples that this process made from the file of another with the same tokens.
    """

    samples: int
    tokens: int
    bytes: int
    seconds: float
    truncated: int
    tokens_per_second: float
    output_dir: str
    complete: bool
    kept: int
    skipped: int
    stalled: float
    overlong: int = 0
    copied: int = 0


@dataclass(frozen=True, slots=True)
class Record:
    """``run.json``.

    Attributes:
        complete: whether every sample is done and the sidecars are written.
        identity: the settings that a later start must share; see ``identity``.
        input: what the check of the input found, for the starts after the first.
        about: for people and tools: configuration, versions, and at the end the summary and the sidecars' digests.
        num_layers: decoder layers of the model; None as long as they are not known.
    """

    complete: bool
    identity: Mapping[str, Any]
    input: Mapping[str, Any]
    about: Mapping[str, Any] = field(repr=False)
    num_layers: int | None = None

    def checked_input(
        self,
        path: Path,
        max_tokens: int,
        vocab_size: int | None,
        limit: int | None,
        *,
        overlong: str | None = None,
        tokenizer: TokenizerSource | None = None,
        trust_remote_code: bool = False,
    ) -> CheckedInput | None:
        """The input, when it was checked in the same way and neither it nor its tokenizer has been touched since.

        Args:
            path: the input.
            max_tokens, vocab_size, limit, overlong, tokenizer: of the check; None for the last two as they were.
            trust_remote_code: let a tokenizer that is as it was bring its own code.
        """
        found = dict(self.input)
        try:
            stamp = stamp_of(path)
            if found.pop("limit") != limit or found.pop("stamp") != list(stamp):
                return None
            del found["file"]
            highest = tuple(found.pop("highest"))
            if told := found.pop("tokenizer", None):
                same = TokenizerSource.from_dict(told, trust_remote_code=trust_remote_code)
                if same is None or tokenizer not in (None, same):
                    return None
                found["tokenizer"] = tokenizer or same
            checked = CheckedInput(path=path, stamp=stamp, highest=highest, **found)
        except (OSError, KeyError, TypeError):
            return None
        same_way = (checked.max_tokens, checked.vocab_size) == (max_tokens, vocab_size)
        return checked if same_way and overlong in (None, checked.overlong) else None


def versions() -> dict[str, str]:
    """Versions of vLLM (``"none"`` without one) and of this package; vLLM is not imported."""
    installed = find_installed()
    return {
        "vllm_version": installed.version_text if installed else "none",
        "vllm_compat_version": vllm_compat.__version__,
    }


def record_of(config: ExtractConfig, identity: Mapping[str, Any], checked: CheckedInput) -> Record:
    """The record of a run that begins."""
    own = [f.name for f in dataclasses.fields(checked) if f.name not in ("path", "duplicates")]
    found = {name: getattr(checked, name) for name in own}
    found |= {"stamp": list(checked.stamp), "highest": list(checked.highest)}  # as they are read back
    found["tokenizer"] = checked.tokenizer and checked.tokenizer.as_dict()
    settings = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return Record(
        complete=False,
        identity=identity,
        input={"file": checked.path.name, "limit": config.num_samples, **found},
        about={"config": settings | {"engine_options": dict(config.engine_options)}, **versions()},
    )


def sealed(record: Record, summary: Summary, done: Done, sidecars: Iterable[Sidecar], num_layers: int | None) -> Record:
    """The record at the end of a run.

    Args:
        record: before that.
        summary: what was done; it says whether the run is complete.
        done: the same, with the samples that were skipped.
        sidecars: what lies beside the samples.
        num_layers: decoder layers of the model; None when not known.
    """
    about = {
        **record.about,
        "summary": dataclasses.asdict(summary),
        "sidecars": [dataclasses.asdict(sidecar) for sidecar in sidecars],
    }
    if done.num_skipped:
        about["skipped"] = [{"index": index, "why": why} for index, why in sorted(done.skipped.items())]
    return dataclasses.replace(record, complete=summary.complete, about=about, num_layers=num_layers)


def unsealed(record: Record) -> Record:
    """The record as it was before ``sealed``."""
    about = {name: value for name, value in record.about.items() if name not in _OF_THE_SEAL}
    return dataclasses.replace(record, complete=False, about=about)


def read_record(folder: Path) -> Record | None:
    """The record in a folder; None when there is none.

    Raises:
        JournalError: there is one that cannot be understood.
        StorageError: it cannot be read.
    """
    path = folder / RUN_FILE
    try:
        with storage(path, "read"):
            try:
                raw = path.read_bytes()
            except FileNotFoundError:
                return None
        found = cast("dict[str, Any]", json.loads(raw))
        about = dict(found)
        complete, identity, checked = about.pop("complete"), about.pop("identity"), about.pop("input")
        num_layers = about.pop("num_layers", None)
        if type(complete) is not bool or not isinstance(identity, dict) or not isinstance(checked, dict):
            raise TypeError
        if num_layers is not None and type(num_layers) is not int:
            raise TypeError(f"num_layers {num_layers!r}")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise JournalError(
            f"{path} is not a run's record of this release ({error!r}); it was changed, or written by another release. "
            "Nothing was touched. Give another output folder, or put the file back",
            path=str(path),
        ) from error
    return Record(complete, cast("dict[str, Any]", identity), cast("dict[str, Any]", checked), about, num_layers)


def write_record(folder: Path, record: Record) -> None:
    """Write ``run.json``.

    Raises:
        StorageError: it cannot be written.
    """
    known = {} if record.num_layers is None else {"num_layers": record.num_layers}
    run = {"complete": record.complete, "identity": record.identity, "input": record.input, **known, **record.about}
    write_whole(folder / RUN_FILE, [(json.dumps(run, indent=2, default=str) + "\n").encode()])
