"""``python -m vllm_compat.extract.stage``: the rehearsal itself, in a process of its own; see ``rehearsal``.

What is to be rehearsed comes as a line of JSON on stdin, the outcome goes as one to stdout, everything else to stderr.
The end of stdin is the end of the process that waits: this one and its workers then end, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from reprlib import repr
from typing import Any, TextIO

from vllm_compat.engine import Engine, open_engine
from vllm_compat.errors import CaptureError, VllmCompatError
from vllm_compat.extract.checksum import xxh3
from vllm_compat.extract.config import ExtractConfig
from vllm_compat.extract.done import SealedEntries
from vllm_compat.extract.run import extract
from vllm_compat.formats import SampleData, get_format

__all__ = ["Played", "Row", "main", "make_rows", "play"]

LONGEST = 1 << 15
"""Tokens of the longest row, whatever the run has."""
_SHORT = (1, 5, 33)
_BEYOND = 33  # tokens that a row has more than one step takes

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Played:
    """What was written and read back.

    Attributes:
        samples: rows.
        tokens: of all rows.
        longest: of the longest row.
        nonfinite: rows whose states are not finite, and which have no file therefore.
    """

    samples: int
    tokens: int
    longest: int
    nonfinite: int


def main() -> int:
    """Read what is to be rehearsed, do it, and tell; the exit code is 0 when there is something to be told."""
    out = _stdout_reserved()
    spec = json.loads(_line(0))
    folder = Path(spec["folder"])
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    try:
        told = _stage(spec, folder)
    except Exception as error:
        traceback.print_exc()
        code = error.exit_code if isinstance(error, VllmCompatError) else None
        told = {"error": str(error)[:20_000], "kind": type(error).__name__, "exit_code": code}
    print(json.dumps(told), file=out, flush=True)
    return 0


def make_rows(longest: int, budget: int, vocab_size: int, special: frozenset[int] = frozenset()) -> list[Row]:
    """Rows of the input that show a single token, short prompts together, and one that takes more than a step.

    Args:
        longest: tokens of the longest sample of the run; no row has more.
        budget: the most tokens of one step.
        vocab_size: token ids are below it.
        special: token ids that are left out.
    """
    rng = random.Random(0)
    plain = [i for i in range(vocab_size // 4, vocab_size // 2) if i not in special][:1000] or [0]  # words, mostly
    lengths = {min(n, longest) for n in (*_SHORT, min(budget + _BEYOND, LONGEST))}
    return [
        {"id": f"rehearsal-{n}", "input_ids": rng.choices(plain, k=n), "loss_mask": [i % 2 for i in range(n)]}
        for n in sorted(lengths, key=lambda n: (n != max(lengths), n))  # the longest first: others join it
    ]


def play(config: ExtractConfig, engine: Engine, rows: list[Row], folder: Path) -> Played:
    """Extract the rows with the engine into a folder, in the format and dtype of the run, and read them back.

    Args:
        config: of the run.
        engine: captures what is rehearsed.
        rows: see ``make_rows``.
        folder: an empty one.

    Raises:
        CaptureError: what is read is not what was extracted.
        VllmCompatError: what ``extract`` raises.
    """
    data, output = folder / "data.jsonl", folder / "out"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    own = dataclasses.replace(
        config,
        model=f"rehearsal of {config.model}",  # no folder, whose config.json would speak of all the model's layers
        prepared_data=data,
        output_dir=output,
        layer_ids=engine.layer_ids,
        num_samples=None,
        generate=0,
        sampling={},
        on_nonfinite="skip",  # which says nothing of a model when its weights are made up
        shard=(0, 1),
    )
    summary = extract(own, engine)
    form = get_format(config.format)
    entries = list(SealedEntries(output, len(rows)))
    if not summary.complete or [entry.index for entry in entries] != list(range(len(rows))):
        raise CaptureError(f"{len(rows)} samples were extracted, and the run's folder has {len(entries)}")
    for entry in entries:
        if not entry.skipped:
            path = output / entry.file
            if (path.stat().st_size, xxh3([path.read_bytes()])) != (entry.bytes, entry.xxh3):
                raise CaptureError(f"{entry.file}: the bytes read are not those that were written")
            _compare(form.decode(path, entry.index), rows[entry.index], engine, config)
    lengths = [len(row["input_ids"]) for row in rows]
    return Played(len(rows), sum(lengths), max(lengths), sum(bool(entry.skipped) for entry in entries))


def _stage(spec: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    from vllm_compat._engine.cut import UncutError, cut_model

    start = time.monotonic()
    config = ExtractConfig(**{name: _as_tuple(value) for name, value in spec["config"].items()})
    options = config.open_engine_options(spec["max_model_len"])
    try:
        cut = cut_model(config.model, options, spec["layer_ids"])
    except UncutError as error:
        return {"uncut": str(error)}
    with open_engine(config.model, layer_ids=cut.first.layer_ids, **cut.options) as engine:
        opened = time.monotonic()
        rows = make_rows(spec["longest"], cut.budget, engine.vocab_size, cut.special)
        played = play(config, engine, rows, folder)
        ended = time.monotonic()
    return {
        **dataclasses.asdict(played),
        "num_layers": cut.first.num_layers,
        "of": cut.first.of,
        "layer_ids": cut.first.layer_ids,
        "unseen": cut.first.unseen,
        "chunked": played.longest > cut.budget,
        "seconds_to_open": opened - start,
        "seconds_to_extract": ended - opened,
    }


def _compare(data: SampleData, row: Row, engine: Engine, config: ExtractConfig) -> None:
    """What a file says, against what went in."""
    tokens = len(row["input_ids"])
    shape = tuple(data.hidden_states.shape)
    dtype = str(data.hidden_states.dtype).removeprefix("torch.")
    any_dtype = config.save_dtype == "auto" or "quantized" in data.metadata
    for what, found, wanted in (
        ("token ids", data.token_ids, tuple(row["input_ids"])),
        ("loss mask", data.loss_mask, tuple(row["loss_mask"])),
        ("layer ids", data.layer_ids, engine.layer_ids),
        ("shape", shape, (tokens, len(engine.layer_ids), engine.hidden_size)),
        ("dtype", dtype, dtype if any_dtype else config.save_dtype),
    ):
        if found != wanted:
            raise CaptureError(f"{config.format}: {what} {repr(found)} was read back, {repr(wanted)} went in")
    if not (abs(data.hidden_states) < float("inf")).all():
        raise CaptureError(f"{config.format}: states that were finite are not when they are read back")


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _stdout_reserved() -> TextIO:
    """The real stdout; whatever vLLM and its workers print goes to stderr."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return out


def _line(descriptor: int) -> bytes:
    """One line, and no more: a buffer's lock would be held by a thread that waits for the next."""
    line = b""
    while not line.endswith(b"\n"):
        if not (part := os.read(descriptor, 1 << 16)):
            raise SystemExit(f"{__name__} is started by the rehearsal, not by hand")
        line += part
    return line


def _end_with_parent(folder: Path) -> None:
    """Wait for the end of stdin; then leave nothing behind: no folder, no worker, no GPU memory."""
    while os.read(0, 1):
        pass
    with contextlib.suppress(Exception):
        shutil.rmtree(folder, ignore_errors=True)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":  # spawned workers import this module
    raise SystemExit(main())
