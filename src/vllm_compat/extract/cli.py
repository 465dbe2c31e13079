"""The command line's options, and the ``ExtractConfig`` they make."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from vllm_compat._layers import parse_layer_id
from vllm_compat.errors import UsageError
from vllm_compat.extract.config import ON_NONFINITE, OVERLONG, SAVE_DTYPES, ExtractConfig
from vllm_compat.formats import FORMATS
from vllm_compat.types import LayerId

__all__ = ["config_of", "make_parser", "same_dashes"]


def same_dashes(argv: Sequence[str]) -> list[str]:
    """The arguments with dashes for the underscores of option names; values are left as they are."""
    return [_same_dashes(argument) if argument.startswith("--") else argument for argument in argv]


def make_parser() -> argparse.ArgumentParser:
    """The parser; it knows option names with dashes only, see ``same_dashes``."""
    parser = argparse.ArgumentParser(
        prog="python -m vllm_compat.extract",
        description="Save the hidden states of a model for tokenized samples, one file for each sample. The same "
        "command again goes on where a run was ended. In option names dashes and underscores are the same.",
        epilog="Exit codes: 0 every sample (of the shard) is written, 2 usage, 3 unsupported vLLM or model, 4 bad "
        "input, 5 states or files that cannot be vouched for, 74 storage (full, failing), 75 stopped by a signal or a "
        "failed step, 1 anything else. After 74 and 75 the same command goes on.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model-path", "--model", dest="model", required=True, metavar="M", help="folder or name of the model")
    add(
        "--prepared-data",
        required=True,
        metavar="FILE",
        help="JSONL (plain, gzip or zstd), parquet, arrow, or the folder of a saved dataset; a row for each sample: "
        "input_ids and optionally loss_mask, or messages or text for the model's own tokenizer; optionally id",
    )
    add("--output-dir", required=True, metavar="DIR", help="where the samples, run.json and the journals go")
    add(
        "--format",
        choices=tuple(FORMATS),
        default="safetensors",
        help="how samples lie on disk (default: %(default)s)",
    )
    add(
        "--layer-ids",
        nargs="+",
        type=_layer_id,
        metavar="ID",
        help="decoder layers from 0, whose outputs are saved in this "
        "order; `norm` is the state after the final norm (default: 2 n//2 n-3 n-1 of n layers)",
    )
    add(
        "--batch-size",
        type=int,
        default=8,
        metavar="N",
        help="the most samples under way at once (default: %(default)s)",
    )
    add("--max-seq-len", type=int, default=2048, metavar="N", help="tokens kept of a sample (default: %(default)s)")
    add(
        "--overlong",
        choices=OVERLONG,
        default="truncate",
        help="what becomes of a sample of more tokens: it is cut, left out and named, or refused before anything "
        "starts (default: %(default)s)",
    )
    add("--num-samples", type=int, metavar="N", help="only the first N samples (default: all)")
    add(
        "--tp-size",
        "--tensor-parallel-size",
        dest="tensor_parallel_size",
        type=int,
        default=1,
        metavar="N",
        help="GPUs to split each layer over (default: %(default)s)",
    )
    add("--gpu-memory-utilization", type=float, metavar="F", help="share of GPU memory to use (default: vLLM's)")
    add("--dtype", default="auto", help="the model's dtype in the engine (default: %(default)s)")
    add(
        "--save-dtype", choices=SAVE_DTYPES, default="bfloat16", help="dtype of the saved states (default: %(default)s)"
    )
    add(
        "--on-nonfinite",
        choices=ON_NONFINITE,
        default="fail",
        help="what a NaN or an infinity in a sample's states does: end the run, or leave the sample out and name it "
        "(default: %(default)s)",
    )
    add(
        "--shard",
        type=_shard,
        default=(0, 1),
        metavar="I/N",
        help="only the samples whose number modulo N is I; N processes into one folder, the last to end seals it",
    )
    add(
        "--replicas",
        type=int,
        metavar="N",
        help="N replicas of the model on a Ray cluster, each with --tp-size GPUs; what a lost one had is done by the "
        "others (extra: ray)",
    )
    add("--writers", type=int, default=2, metavar="N", help="threads that write files (default: %(default)s)")
    add(
        "--max-pending-gb",
        dest="max_pending_bytes",
        type=_gib,
        default=2 << 30,
        metavar="GB",
        help="GiB of states that may wait to be written, beyond which the engine waits (default: 2)",
    )
    add("--max-num-batched-tokens", type=int, metavar="N", help="the most tokens of one step (default: vLLM's)")
    add(
        "--share-prefixes",
        action="store_true",
        help="forward tokens that samples begin with alike once: system prompts, turns of one conversation, answers to "
        "one prompt",
    )
    add(
        "--generate",
        type=int,
        default=0,
        metavar="N",
        help="take the samples for prompts: the model answers each with at most N tokens, and both are saved",
    )
    add(
        "--sampling",
        action="append",
        type=_option,
        default=[],
        metavar="NAME=JSON",
        help="how answers are sampled, e.g. temperature=0.7 or seed=1; repeatable (default: greedy)",
    )
    add("--trust-remote-code", action="store_true", help="let the model bring its own code")
    add(
        "--engine-option",
        action="append",
        type=_option,
        default=[],
        metavar="NAME=JSON",
        help="one more option of the engine, e.g. seed=1 or 'quantization=\"fp8\"'; repeatable",
    )
    add(
        "--estimate",
        action="store_true",
        help="check everything and say what the run will take, in tokens, bytes and memory; extract nothing",
    )
    add(
        "--tokens-per-second",
        type=float,
        metavar="N",
        help="what the estimate takes for the speed of this process, or of all replicas together, to say how long it "
        "will be at it",
    )
    add(
        "--no-rehearsal",
        dest="rehearsal",
        action="store_false",
        help="load the model without running its first layers with made-up weights before",
    )
    add("--json", action="store_true", help="print the summary as one JSON object on stdout; all else goes to stderr")
    return parser


def config_of(options: argparse.Namespace) -> ExtractConfig:
    """The configuration that parsed options make.

    Raises:
        UsageError: a value that cannot mean anything, or an engine option given twice.
    """
    values = vars(options)
    layer_ids: list[LayerId] | None = values["layer_ids"]
    own = {f.name for f in dataclasses.fields(ExtractConfig)} - {"layer_ids", "engine_options", "sampling"}
    return ExtractConfig(
        **{name: value for name, value in values.items() if name in own},
        layer_ids=None if layer_ids is None else tuple(layer_ids),
        engine_options=_once("--engine-option", values["engine_option"]),
        sampling=_once("--sampling", values["sampling"]),
    )


def _once(option: str, pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise UsageError(f"{option} {name} is given twice")
        found[name] = value
    return found


def _same_dashes(option: str) -> str:
    name, equals, value = option.partition("=")
    return name.replace("_", "-") + equals + value


def _layer_id(text: str) -> LayerId:
    try:
        return parse_layer_id(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _shard(text: str) -> tuple[int, int]:
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise argparse.ArgumentTypeError(f"wants I/N with I from 0 to N - 1, found {text!r}")
    return int(index), int(count)


def _gib(text: str) -> int:
    try:
        return int(float(text) * 2**30)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"wants a number of GiB, found {text!r}") from None


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"wants NAME=JSON, found {text!r}")
    try:
        return name.replace("-", "_"), json.loads(value)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{name}: {value!r} is not JSON; text needs its quotes: {name}='\"text\"'"
        ) from None
