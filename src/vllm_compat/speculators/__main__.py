"""``python -m vllm_compat.speculators run SCRIPT ARGS...``: a script of speculators' users, on any vLLM."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from vllm_compat._logging import logging_to_stderr
from vllm_compat.detection import detect
from vllm_compat.doctor.pair import judge_pair
from vllm_compat.errors import VllmCompatError
from vllm_compat.speculators.script import run_script

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    Raises:
        SystemExit: with 0 after ``--help``, with 2 for options that argparse refuses, and the script's own.
    """
    options = _make_parser().parse_args(argv)
    with logging_to_stderr():
        try:
            detect().require_adapter()
            print(_what_is_replaced(), file=sys.stderr)
            run_script(options.script, options.arguments)
        except VllmCompatError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
    return 0


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_compat.speculators",
        description="Run a script that uses the VllmHiddenStatesGenerator of speculators 0.3.0 to 0.4.0.1, with ours "
        "in its place. Nothing that is installed is touched.",
        epilog="Exit codes: the script's own; 2 for a script that cannot be read, 3 where nothing serves the installed "
        "vLLM, and those of vllm_compat's errors where the script lets them through.",
        allow_abbrev=False,
    )
    command = parser.add_subparsers(dest="command", required=True).add_parser("run", help="run a script")
    command.add_argument("script", metavar="SCRIPT", help="path of a Python file")
    command.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="its own command line")
    return parser


def _what_is_replaced() -> str:
    try:
        installed = version("speculators")
    except PackageNotFoundError:
        installed = None
    _, pair = judge_pair(detect(), installed)
    reasons = [f"  - {s.text}" for s in pair if s.name.startswith("fails_")]
    found = f"vllm_compat: for this run the generator of speculators {installed or '(not installed)'} is ours."
    return "\n".join([found + (" By itself it would fail here:" if reasons else ""), *reasons])


if __name__ == "__main__":
    raise SystemExit(main())
