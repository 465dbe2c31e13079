"""``python -m vllm_compat.extract``: exit code 0 when all is written (or estimated), else the error's own."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Generator, Sequence
from typing import TextIO

from vllm_compat._logging import logging_to_stderr
from vllm_compat.errors import StoppedError, UsageError, VllmCompatError
from vllm_compat.extract.cli import config_of, make_parser, same_dashes
from vllm_compat.extract.estimate import estimate_of
from vllm_compat.extract.progress import show
from vllm_compat.extract.replicas import extract_on_ray
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
    with logging_to_stderr(), contextlib.ExitStack() as stack:
        out = stack.enter_context(_stdout_reserved()) if options.json else None
        stop = stack.enter_context(stop_on_signals())
        try:
            config, tokens_per_second = config_of(options), options.tokens_per_second
            if options.estimate:
                expected = estimate_of(config, tokens_per_second)
                print(json.dumps(expected.as_dict()) if out else expected, file=out)
                return UsageError.exit_code if expected.refusal else 0
            if options.replicas is not None:
                summary = extract_on_ray(config, options.replicas, show, stop, tokens_per_second)
            else:
                summary = extract(config, progress=show, stop=stop, tokens_per_second=tokens_per_second)
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
