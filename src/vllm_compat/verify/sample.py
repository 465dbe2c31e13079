"""One sample's file: every byte, and everything it says of itself."""

from __future__ import annotations

import json
import stat
import threading
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_compat.errors import UsageError
from vllm_compat.extract.checksum import new_hash
from vllm_compat.extract.inputs import Sample
from vllm_compat.extract.journal import Entry
from vllm_compat.formats import SampleData, SampleFileError
from vllm_compat.formats.base import LAYER_ID_CONVENTION
from vllm_compat.types import NORM, Tensor
from vllm_compat.verify.finite import DTYPES, dtype_name, find_nonfinite
from vllm_compat.verify.run import RunFacts

__all__ = ["Checked", "Expected", "check_sample"]

_PART = 4 << 20


class _Buffer(threading.local):
    """What a thread reads into."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(_PART))


_buffer = _Buffer()


@dataclass(frozen=True, slots=True)
class Expected:
    """What a sample's file must be.

    Attributes:
        entry: its line in the journal.
        row: its row of the input; None when the input is not compared.
        compared: whether the input is compared.
        hidden_size: width of a state; None while it is not known.
        ends: positions of the layers whose last state is wanted for the self-check.
    """

    entry: Entry
    row: Sample | None
    compared: bool
    hidden_size: int | None
    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Checked:
    """What was found.

    Attributes:
        entry: the sample's line in the journal.
        line: of the input; 0 when not known.
        what: everything that is wrong, in words.
        size: bytes that were read.
        hidden_size: width of its states; None when they could not be read.
        dtype: of its states on disk; empty when they could not be read.
        sampled: the tokens that vLLM sampled after states of this sample: one, or each of an answer.
        first: position of the first of these states.
        ends: these states at each layer that was wanted, [len(sampled), hidden_size]; none where something is wrong.
    """

    entry: Entry
    line: int
    what: tuple[str, ...]
    size: int
    hidden_size: int | None = None
    dtype: str = ""
    sampled: tuple[int, ...] = field(default=(), repr=False)
    first: int = 0
    ends: tuple[Tensor, ...] = field(default=(), repr=False)


def check_sample(run: RunFacts, expected: Expected) -> Checked:
    """Read a sample's file; whatever is wrong with it is told.

    A file of the wrong size or bytes is looked at further, since what else is wrong may say whose it is.

    Raises:
        UsageError: a package that the format takes is not installed.
    """
    entry, line = expected.entry, expected.row.line if expected.row else 0
    path = run.folder / entry.file
    name = str(run.format.file(entry.index, entry.id))
    wrong = [] if entry.file == name else [f"the format's name for it is {name}"]
    try:
        size = _size(path)
        digest = _digest(path) if size == entry.bytes else None
    except FileNotFoundError:
        return Checked(entry, line, (*wrong, "the file is gone"), 0)
    except OSError as error:
        return Checked(entry, line, (*wrong, f"it cannot be read: {error.strerror or error}"), 0)
    if digest is None:
        wrong.append(f"it has {size} bytes, {entry.bytes} were written")
    elif digest != entry.xxh3:
        wrong.append(f"it is not what was written: its xxh3 is {digest}, {entry.xxh3} was written")
    try:
        sample = run.format.decode(path, entry.index)
        wrong += _differences(run, sample, expected)
    except UsageError:
        raise
    except Exception as error:  # bytes that are not what was written can be anything
        if not wrong and not isinstance(error, SampleFileError):
            raise
        return Checked(entry, line, tuple(wrong) or (str(error),), size)
    states = sample.hidden_states
    first, sampled = _sampled(run, sample, entry)
    ends = () if wrong or not sampled else tuple(_copy(states[first:, at]) for at in expected.ends)
    return Checked(
        entry,
        line,
        tuple(wrong),
        size,
        hidden_size=int(states.shape[2]),
        dtype=sample.metadata.get("quantized", dtype_name(states)),
        sampled=sampled,
        first=first,
        ends=ends,
    )


def _sampled(run: RunFacts, sample: SampleData, entry: Entry) -> tuple[int, tuple[int, ...]]:
    """What vLLM sampled, and the position of the state that came before it."""
    count = len(sample.token_ids)
    if entry.sampled is None or not count:
        return count, ()
    told = sample.metadata.get("num_prompt_tokens", "") if run.generate else ""
    prompt = int(told) if told.isdecimal() and 0 < int(told) <= count else count
    return prompt - 1, (*sample.token_ids[prompt:], entry.sampled)


def _size(path: Path) -> int:
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{path} is no regular file")
    return found.st_size


def _digest(path: Path) -> str:
    hasher, view = new_hash(), _buffer.view
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(view):
            hasher.update(view[:count])
    return hasher.hexdigest()


def _differences(run: RunFacts, sample: SampleData, expected: Expected) -> Generator[str, None, None]:
    """Everything in which a sample differs from journal, run and input."""
    entry, states = expected.entry, sample.hidden_states
    if len(sample.token_ids) != entry.tokens:
        yield f"it has {len(sample.token_ids)} tokens, the journal says {entry.tokens}"
    if sample.layer_ids != run.layer_ids:
        yield f"its layers are {_text(sample.layer_ids)}, the run's {_text(run.layer_ids)}"
    if sample.id != entry.id:
        yield f"its id is {sample.id!r}, the journal says {entry.id!r}"
    dtype, wanted = dtype_name(states), _dtype(run, sample)
    if wanted not in (dtype, "auto"):
        yield f"its states are {dtype}, the run's {wanted}"
    if expected.hidden_size not in (None, states.shape[2]):
        yield f"its states have the width {states.shape[2]}, {expected.hidden_size} is the model's"
    yield from _metadata(run, sample.metadata, entry)
    if expected.compared:
        yield from _row(run, sample, entry, expected.row)
    if dtype not in DTYPES:
        yield f"its states are {dtype}, wanted one of {', '.join(sorted(DTYPES))}"
    elif found := find_nonfinite(states):
        token, layer = found
        yield f"the state of token {token} at layer id {sample.layer_ids[layer]} is not finite"


def _metadata(run: RunFacts, metadata: Any, entry: Entry) -> Generator[str, None, None]:
    wanted = {
        "index": str(entry.index),
        "layer_id_convention": LAYER_ID_CONVENTION,
        "post_norm": json.dumps([layer_id == NORM for layer_id in run.layer_ids]),
        "sampled_token": "" if entry.sampled is None else str(entry.sampled),
    }
    if run.revision is not None and metadata.get("model_revision") != "unknown":
        wanted["model_revision"] = run.revision
    for name, text in wanted.items():
        if metadata.get(name, text) != text:
            yield f"its metadata says {name} {metadata[name]!r}, wanted {text!r}"


def _row(run: RunFacts, sample: SampleData, entry: Entry, row: Sample | None) -> Generator[str, None, None]:
    if row is None:
        yield "the input has no such row"
        return
    prompt = len(row.token_ids)
    own = sample.token_ids[:prompt] if run.generate else sample.token_ids
    if own != row.token_ids:
        pairs = zip(own, row.token_ids, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(own), prompt))
        yield f"its tokens are not the input's: {len(own)} and {prompt} of them, different from position {at} on"
    answer = len(sample.token_ids) - prompt
    if run.generate and answer >= run.generate:
        yield f"{answer} tokens follow its prompt, and {run.generate - 1} at most are an answer's"
    if sample.loss_mask != ((0,) * prompt + (1,) * answer if run.generate else row.loss_mask):
        yield "its loss mask is not that of prompt and answer" if run.generate else "its loss mask is not the input's"
    if entry.id != row.id:
        yield f"the journal's id is {entry.id!r}, the input's {row.id!r}"


def _dtype(run: RunFacts, sample: SampleData) -> str:
    """What decoding must give: float8 is decoded to bfloat16, whatever was captured."""
    return "bfloat16" if "quantized" in sample.metadata else run.save_dtype


def _copy(row: Tensor) -> Tensor:
    """A row of its own, without the file it is a part of."""
    return row.clone() if hasattr(row, "clone") else row.copy()


def _text(layer_ids: tuple[object, ...]) -> str:
    return " ".join(map(str, layer_ids))
