"""``python -m vllm_compat``: what is installed and what serves it (``detect``, ``doctor``), and the other commands."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from vllm_compat.detection import detect
from vllm_compat.doctor.model import judge_model
from vllm_compat.doctor.report import make_report
from vllm_compat.doctor.text import as_text
from vllm_compat.errors import UnsupportedVllmError, VllmCompatError

__all__ = ["main"]

# Those with options of their own: the module whose ``main`` runs them, and what they do.
_COMMANDS = {
    "extract": ("vllm_compat.extract.__main__", "hidden states of a data set"),
    "verify": ("vllm_compat.verify.cli", "prove that a run's files are right"),
    "identify": ("vllm_compat.identify.__main__", "which layers of a model the files of any tool hold"),
    "convert": ("vllm_compat.convert.cli", "a finished run in another format"),
    "speculators": ("vllm_compat.speculators.__main__", "a script for speculators' own generator, run with ours"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Returns:
        The exit code: 0, 2 for a model of which nothing can be read, 3 where no adapter serves the installed vLLM, or
        the model cannot be captured by it.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in _COMMANDS:
        module, _ = _COMMANDS[arguments[0]]
        run: Callable[[Sequence[str]], int] = import_module(module).main
        return run(arguments[1:])
    options = _parse(arguments)
    found = detect()
    try:
        if options.command == "detect":
            report = found.as_dict()
            del report["verdicts"]
            verdict = None
        else:
            verdict = judge_model(found, options.model) if options.model and found.installed else None
            report = make_report(found, verdict)
    except VllmCompatError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(report, indent=2) if options.json else as_text(report))
    try:
        found.require_adapter()
        if verdict:
            verdict.require_capture()
    except UnsupportedVllmError as error:
        if not options.json:
            print(f"\n{error}", file=sys.stderr)
        return error.exit_code
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m vllm_compat", description="What is installed, and what serves it.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in [
        ("detect", "which vLLM is installed, and what serves it"),
        ("doctor", "what can be done with it, with speculators and with a model; every verdict with its evidence"),
    ]:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--json", action="store_true", help="as one JSON object")
        if name == "doctor":
            command.add_argument("--model", metavar="DIR", help="folder of a model: can it be captured here, and how")
    for name, (_, text) in _COMMANDS.items():
        commands.add_parser(name, help=f"{text}; has a --help of its own")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
