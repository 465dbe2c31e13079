"""``python -m vllm_compat``: what is installed and what serves it (``detect``, ``doctor``), and ``extract``."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from vllm_compat import __version__
from vllm_compat.detection import Detection, detect
from vllm_compat.errors import UnsupportedVllmError

__all__ = ["main"]

_NEIGHBOURS = ("torch", "transformers", "speculators", "safetensors")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code: 0, or 3 where no adapter serves the installed vLLM."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["extract"]:
        from vllm_compat.extract.__main__ import main as extract

        return extract(arguments[1:])
    parser = argparse.ArgumentParser(prog="python -m vllm_compat", description="What is installed, and what serves it.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in [
        ("detect", "which vLLM is installed, and what serves it"),
        ("doctor", "the same with every verdict and its reason, and the neighbours' versions"),
    ]:
        commands.add_parser(name, help=text).add_argument("--json", action="store_true", help="as one JSON object")
    commands.add_parser("extract", help="hidden states of a data set; see `python -m vllm_compat.extract --help`")
    options = parser.parse_args(arguments)

    found = detect()
    report = found.as_dict()
    if options.command == "doctor":
        report["vllm_compat"] = __version__
        report["python"] = platform.python_version()
        report["neighbours"] = {name: _version(name) for name in _NEIGHBOURS}
    else:
        del report["verdicts"]
    print(json.dumps(report, indent=2) if options.json else _as_text(report))
    return _exit_code(found, quiet=options.json)


def _exit_code(found: Detection, *, quiet: bool) -> int:
    try:
        found.require_adapter()
    except UnsupportedVllmError as error:
        if not quiet:
            print(f"\n{error}", file=sys.stderr)
        return error.exit_code
    return 0


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _as_text(report: dict[str, object]) -> str:
    lines = []
    for name, value in report.items():
        if name == "verdicts":
            lines.append("verdicts")
            for v in report["verdicts"]:  # type: ignore[attr-defined]
                lines.append(f"  {v['variation']:<9}{v['name']:<17}{'fits' if v['fits'] else 'NO  '}  {_short(v)}")
        elif isinstance(value, dict):
            lines.append(name)
            lines += [f"  {key:<32}{', '.join(v) if isinstance(v, list) else v}" for key, v in value.items()]
        elif isinstance(value, list):
            lines += [f"{name:<14}{text}" for text in value]
        else:
            lines.append(f"{name:<14}{value}")
    return "\n".join(lines)


def _short(verdict: dict[str, object]) -> str:
    """The reason with the symbols that were found counted, not listed: nobody reads fifteen of them."""
    reason = str(verdict["reason"])
    return reason if not verdict["fits"] else f"{reason.count(':')} symbol(s) found"


if __name__ == "__main__":
    raise SystemExit(main())
