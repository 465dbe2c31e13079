"""``python -m vllm_compat convert``: exit code 0 when all is converted, else the error's own."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from vllm_compat._layers import parse_layer_id
from vllm_compat._logging import logging_to_stderr
from vllm_compat.convert.config import ConvertConfig
from vllm_compat.convert.run import convert
from vllm_compat.errors import StoppedError, VllmCompatError
from vllm_compat.extract.progress import show
from vllm_compat.extract.stop import stop_on_signals
from vllm_compat.formats import FORMATS
from vllm_compat.types import LayerId

__all__ = ["main", "make_parser"]

_INTERRUPTED = 128 + 2  # what a shell reports for a process that SIGINT ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    Raises:
        SystemExit: with 0 after ``--help``, with 2 for options that argparse refuses.
    """
    options = vars(make_parser().parse_args(argv))
    as_json = options.pop("json")
    with logging_to_stderr(), stop_on_signals() as stop:
        try:
            summary = convert(_config_of(options), progress=show, stop=stop)
        except VllmCompatError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
        except KeyboardInterrupt:
            print(f"error: stopped by {stop.reason or 'an interrupt'}", file=sys.stderr)
            return StoppedError.exit_code if stop.reason else _INTERRUPTED
    if as_json:
        print(json.dumps(dataclasses.asdict(summary)))
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The parser."""
    parser = argparse.ArgumentParser(
        prog="python -m vllm_compat convert",
        description="Write a finished run in another format, with every file's checksum verified on the way. The same "
        "command goes on with a conversion that was ended.",
        epilog="Exit codes: 0 all is converted, 2 usage, 5 a file that is not what was written, 74 storage, 75 stopped "
        "(the same command goes on), 1 anything else.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run_dir", metavar="RUN_DIR", help="folder of the run")
    add("output_dir", metavar="OUT_DIR", help="folder of the result")
    add("--format", required=True, choices=list(FORMATS), help="how the result lies on disk; see docs/formats.md")
    add(
        "--layer-ids",
        nargs="+",
        type=_layer_id,
        metavar="ID",
        help="layers of the result, in order; numbers or `norm` (default: those of the run)",
    )
    add("--model", metavar="DIR", help="the model's folder: computes `norm` from the last layer's state")
    add("--partial", action="store_true", help="convert what is done of a run that is not complete")
    add("--json", action="store_true", help="print the summary as one JSON object on stdout")
    return parser


def _config_of(options: dict[str, Any]) -> ConvertConfig:
    layer_ids: list[LayerId] | None = options.pop("layer_ids")
    return ConvertConfig(**options, layer_ids=None if layer_ids is None else tuple(layer_ids))


def _layer_id(text: str) -> LayerId:
    try:
        return parse_layer_id(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
