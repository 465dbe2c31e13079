"""``python -m vllm_compat.extract``: exit code 0 when every sample of the shard is written, else the error's own."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import sys
from collections.abc import Generator, Sequence
from typing import TextIO

from vllm_compat.errors import StoppedError, VllmCompatError
from vllm_compat.extract.cli import config_of, make_parser, same_dashes
from vllm_compat.extract.progress import show
from vllm_compat.extract.run import extract
from vllm_compat.extract.stop import stop_on_signals

__all__ = ["main"]

_INTERRUPTED = 128 + 2  # what a shell reports for a process that SIGINT ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    Raises:
        SystemExit: with 0 after ``--help``, with 2 for options that argparse refuses.
    """
    options = make_parser().parse_args(same_dashes(sys.argv[1:] if argv is None else argv))
    with _logging_to_stderr(), contextlib.ExitStack() as stack:
        out = stack.enter_context(_stdout_reserved()) if options.json else None
        stop = stack.enter_context(stop_on_signals())
        try:
            summary = extract(config_of(options), progress=show, stop=stop)
        except VllmCompatError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
        except KeyboardInterrupt:
            why = f"stopped by {stop.reason}; the same command goes on from there" if stop.reason else "interrupted"
            print(f"error: {why}", file=sys.stderr)
            return StoppedError.exit_code if stop.reason else _INTERRUPTED
        if out:
            print(json.dumps(dataclasses.asdict(summary)), file=out)
    return 0


@contextlib.contextmanager
def _logging_to_stderr() -> Generator[None, None, None]:
    logger = logging.getLogger("vllm_compat")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    propagate, logger.propagate = logger.propagate, False  # something that vLLM imports may log every line again
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


@contextlib.contextmanager
def _stdout_reserved() -> Generator[TextIO, None, None]:
    """The real stdout, for the summary alone: vLLM and its workers log to stdout, which goes to stderr meanwhile."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(kept, "w", encoding="utf-8", closefd=False) as out, contextlib.redirect_stdout(sys.stderr):
            yield out
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


if __name__ == "__main__":  # spawned workers import this module
    raise SystemExit(main())
