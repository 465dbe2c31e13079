"""What a run says of itself: ``run.json`` in the output folder, the summary at the end, and the lines at both ends."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import vllm_compat
from vllm_compat._detect.installed import find_installed
from vllm_compat.extract.config import ExtractConfig
from vllm_compat.extract.files import write_whole
from vllm_compat.extract.plan import Plan

__all__ = ["RUN_FILE", "Summary", "log_plan", "log_summary", "versions", "write_run"]

RUN_FILE = "run.json"
_GB = 1e9

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Summary:
    """What a complete run did.

    Attributes:
        samples: samples written, one file each.
        tokens: their tokens.
        bytes: size of their files.
        seconds: from the first request to the last file; loading the model is not in it.
        truncated: samples that lost tokens.
        tokens_per_second: ``tokens / seconds``.
        output_dir: where the files are.
    """

    samples: int
    tokens: int
    bytes: int
    seconds: float
    truncated: int
    tokens_per_second: float
    output_dir: str


def versions() -> dict[str, str]:
    """Versions of vLLM (``"none"`` without one) and of this package; vLLM is not imported."""
    installed = find_installed()
    return {
        "vllm_version": installed.version_text if installed else "none",
        "vllm_compat_version": vllm_compat.__version__,
    }


def write_run(plan: Plan, config: ExtractConfig, summary: Summary | None = None) -> None:
    """Write ``run.json``: ``complete`` is true, and the counts are there, only with a summary.

    Raises:
        VllmCompatError: it cannot be written.
    """
    settings = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    run: dict[str, Any] = {
        "complete": summary is not None,
        "input_file": plan.input.path.name,
        "samples": plan.input.num_samples,
        "tokens": plan.input.num_tokens,
        "truncated": plan.input.num_truncated,
        "max_tokens": plan.input.max_tokens,
        "layer_ids": plan.layer_ids,
        "config": settings | {"engine_options": dict(config.engine_options)},
        **versions(),
    }
    if summary:
        run["summary"] = dataclasses.asdict(summary)
    write_whole(plan.output_dir / RUN_FILE, [(json.dumps(run, indent=2, default=str) + "\n").encode()])


def log_plan(plan: Plan, config: ExtractConfig) -> None:
    """One line on what is to come; a warning for what may surprise."""
    found = plan.input
    size = "of unknown size"
    if plan.bytes_per_token is not None:
        expected = found.num_tokens * plan.bytes_per_token
        size = f"about {expected / _GB:.3f} GB ({plan.bytes_per_token} bytes a token)"
        free = shutil.disk_usage(plan.output_dir).free
        if free < expected:
            logger.warning("%s has %.3f GB free, %.3f GB are expected", plan.output_dir, free / _GB, expected / _GB)
    logger.info(
        "%d samples, %d tokens, %s, layers %s, to %s; %d of the samples are cut at %d tokens",
        found.num_samples,
        found.num_tokens,
        size,
        " ".join(map(str, plan.layer_ids)),
        plan.output_dir,
        found.num_truncated,
        found.max_tokens,
    )
    if found.max_tokens < config.max_seq_len:
        logger.warning(
            "the model has %d positions, one of which the sampled token needs: samples are cut at %d tokens, not at %d",
            plan.max_model_len,
            found.max_tokens,
            config.max_seq_len,
        )
    if config.num_samples is not None and found.num_samples < config.num_samples:
        logger.warning("%d samples were asked for, the file has %d", config.num_samples, found.num_samples)


def log_summary(summary: Summary) -> None:
    """One line on what was done."""
    logger.info(
        "all %d samples are written to %s: %d tokens, %.3f GB, %d samples cut; %.1f s, %.0f tokens/s, %.1f MB/s",
        summary.samples,
        Path(summary.output_dir),
        summary.tokens,
        summary.bytes / _GB,
        summary.truncated,
        summary.seconds,
        summary.tokens_per_second,
        summary.bytes / 1e6 / max(summary.seconds, 1e-9),
    )
