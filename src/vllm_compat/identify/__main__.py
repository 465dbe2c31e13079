"""``python -m vllm_compat identify``: exit code 0 when every entry is a state of the model, and the one expected."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_compat._layers import parse_layer_id
from vllm_compat.errors import UsageError, VllmCompatError
from vllm_compat.identify.match import Entry, Found, identify
from vllm_compat.types import NORM, LayerId

__all__ = ["main"]

_WRONG = 5


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    Raises:
        SystemExit: with 0 after ``--help``, with 2 for options that argparse refuses.
    """
    options = vars(_make_parser().parse_args(argv))
    as_json, expected = options.pop("json"), options.pop("expect")
    try:
        found = identify(**options)
        if expected is not None and len(expected) != len(found.entries):
            raise UsageError(f"{len(expected)} ids are expected of {len(found.entries)} entries: {_names(found)}")
    except VllmCompatError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(dataclasses.asdict(found), default=str) if as_json else "\n".join(_lines(found, expected)))
    wanted = found.layer_ids if expected is None else tuple(expected)
    return 0 if None not in found.layer_ids and found.layer_ids == wanted else _WRONG


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_compat identify",
        description="Say which layers of a model the files of any tool hold, and whether the last state is before or "
        "after the final norm: samples are computed again by HF transformers, and each of their tensors is compared "
        "with every state of the model. No code in the files is run, and nothing is changed.",
        epilog="Exit codes: 0 every tensor is a state of the model (and the one that is expected), 2 usage, 4 a file "
        "or model that cannot be used, 5 a tensor that is no state of the model, or not the expected one.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("folder", metavar="DIR", type=Path, help="where the files are: .pt, .ckpt or .safetensors")
    add("--model", required=True, metavar="M", help="a folder, or a name that is in the hub's local cache")
    add("--samples", type=_at_least_one, default=4, metavar="K", help="files taken at random (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="of the choice (default: %(default)s)")
    add("--expect", nargs="+", type=_layer_id, metavar="ID", help="what the entries should be, numbers or `norm`")
    add("--device", default="cpu", help="where torch computes (default: %(default)s)")
    add("--trust-remote-code", action="store_true", help="let the model bring its own code")
    add("--json", action="store_true", help="as one JSON object")
    return parser


def _lines(found: Found, expected: Sequence[LayerId] | None) -> list[str]:
    rows = [("entry", "holds", "typical", "bound", "nearest other")]
    for at, entry in enumerate(found.entries):
        holds = _words(entry, found)
        if expected is not None and entry.holds != expected[at]:
            holds += f", and not {expected[at]}"
        other = f"{entry.nearest} ({entry.nearest_error:.1e})"
        rows.append((entry.name, holds, f"{entry.error:.1e}", f"{entry.bound:.1e}", other))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    taken = ", ".join(path.name for path in found.samples)
    return [f"{len(found.samples)} of {found.num_files} files computed again: {taken}", "", *table, *_last(found)]


def _words(entry: Entry, found: Found) -> str:
    if entry.holds is not None:
        return _state(entry.holds, found.num_layers)
    if len(set(entry.by_sample)) > 1:
        return "not the same in each: " + ", ".join("none" if k is None else str(k) for k in entry.by_sample)
    return "no state of this model"


def _state(name: object, num_layers: int) -> str:
    if name == NORM:
        return "norm (the last state, after the final norm)"
    if name == num_layers - 1:
        return f"layer {name} (the last one, before the final norm)"
    return f"layer {name}" if isinstance(name, int) else "the embeddings"


def _last(found: Found) -> list[str]:
    """Who wants such files, where they have a last state."""
    if NORM in found.layer_ids:
        who = "the trainers of speculators 0.3.0 and SpecForge. Those of speculators from 0.4 on apply the norm again"
        return ["", f"After the norm: for {who}, without an error."]
    if found.num_layers - 1 in found.layer_ids:
        who = "the trainers of speculators from 0.4 on. That of 0.3.0 takes it for normed"
        return ["", f"Before the norm: for {who}, without an error."]
    return []


def _names(found: Found) -> str:
    return ", ".join(entry.name for entry in found.entries)


def _layer_id(text: str) -> LayerId:
    try:
        return parse_layer_id(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"wants a number from 1, found {text!r}")
    return int(text)


if __name__ == "__main__":
    raise SystemExit(main())
