"""The command line of ``verify``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_compat._logging import logging_to_stderr
from vllm_compat.errors import StorageError, VllmCompatError
from vllm_compat.extract.cli import same_dashes
from vllm_compat.extract.progress import show
from vllm_compat.verify.config import VerifyConfig
from vllm_compat.verify.problems import JsonReport
from vllm_compat.verify.prove import verify
from vllm_compat.verify.text import as_text

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    Raises:
        SystemExit: with 0 after ``--help``, with 2 for options that argparse refuses.
    """
    options = vars(_make_parser().parse_args(same_dashes(sys.argv[1:] if argv is None else argv)))
    path: Path | None = options.pop("json")
    report = None
    try:
        config = VerifyConfig(**options)
        report = JsonReport(path) if path else None
        with logging_to_stderr():
            verdict = verify(config, report=report, progress=show)
        if report:
            report.close(verdict.as_dict())
    except VllmCompatError as error:
        print(f"error: {error}", file=sys.stderr)
        if report and not isinstance(error, StorageError):
            report.close({"exit_code": error.exit_code, "error": str(error)})
        return error.exit_code
    print(as_text(verdict, f"all of them in {path}" if path else "which --json FILE gives"))
    return verdict.exit_code


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_compat verify",
        description="Prove that the output of an extraction is right. Every file is read and compared with the "
        "journals and the input; the last layer's states must give the tokens that vLLM sampled; with --model, samples "
        "are computed again by HF transformers. Nothing in the folder is changed.",
        epilog="Exit codes: 0 complete and good, 2 usage, 4 an input or model that cannot be used, 5 something is "
        "wrong (each problem is named), 74 storage, 75 sound so far and not complete.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("folder", metavar="DIR", type=Path, help="the folder that was --output-dir")
    add(
        *("--prepared-data",),
        type=Path,
        metavar="FILE",
        help="the run's input (default: the file that the run names, as long as it is what it was)",
    )
    add("--partial", action="store_true", help="a run that is not complete is no failure if what is there is sound")
    add("--jobs", type=int, metavar="N", help="threads that read (default: as many as cores, 8 at most)")
    add(
        *("--model", "--model-path"),
        dest="model",
        metavar="M",
        help="compute samples again with this model: a folder, or a name that is in the hub's local cache",
    )
    add(
        *("--samples",),
        type=int,
        metavar="K",
        help="take K samples at random, to compute again and for the self-check (default: 4, and all)",
    )
    add("--seed", type=int, default=0, metavar="N", help="of the choice (default: %(default)s)")
    add(
        *("--no-scan",),
        dest="scan",
        action="store_false",
        help="read the files of these samples alone",
    )
    add(
        *("--bound",),
        type=float,
        metavar="X",
        help="what a layer's typical error may be (default: 1e-5 for float32 in engine and files, else twice what HF's "
        "own bfloat16 has)",
    )
    add("--device", default="cpu", help="where torch computes (default: %(default)s)")
    add("--trust-remote-code", action="store_true", help="let the model bring its own code")
    add("--picture", type=Path, metavar="FILE", help="draw the cosine of each layer and position, as PNG")
    add("--json", type=Path, metavar="FILE", help="write all problems and figures there, as one JSON object")
    return parser
