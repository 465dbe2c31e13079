"""What a run says in the log, at both ends."""

from __future__ import annotations

import json
import logging

from vllm_compat.errors import StepError
from vllm_compat.extract.config import ExtractConfig
from vllm_compat.extract.done import Done
from vllm_compat.extract.estimate import Estimate
from vllm_compat.extract.plan import Plan
from vllm_compat.extract.record import Summary

__all__ = ["ended", "log_end", "log_plan", "log_summary"]

_GB = 1e9

logger = logging.getLogger(__name__)


def log_plan(plan: Plan, config: ExtractConfig, done: Done, expected: Estimate) -> None:
    """What is to come; a warning for what may surprise."""
    found = plan.input
    logger.info("layers %s of %s, to %s", " ".join(map(str, plan.layer_ids)), config.model, plan.output_dir)
    for line in str(expected).splitlines():
        logger.info("%s", line)
    if len(done) or config.shard[1] > 1:
        logger.info(
            "%d samples are done already; %d are to be done by this process (shard %d/%d)",
            len(done),
            done.owed(config.shard),
            *config.shard,
        )
    if found.tokenizer:
        logger.info("rows of %s, made into tokens by the tokenizer of %s", found.kind, found.tokenizer.name)
    if found.num_left_out:
        logger.warning(
            "%d samples have more than %d tokens and are left out; they keep their numbers",
            found.num_left_out,
            found.max_tokens,
        )
    if found.num_without_loss and not config.generate:  # an answer is under its mask
        logger.warning(
            "%d samples have no token under the loss mask%s; they are extracted all the same",
            found.num_without_loss,
            ", or none left after the cut" if found.num_truncated else "",
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


def ended(plan: Plan, done: Done, reason: str) -> str:
    """Why a run ended early, and what there is of it."""
    return (
        f"stopped by {reason}: {len(done)} of {plan.input.num_samples} samples are done in {plan.output_dir}, each "
        "whole; the same command goes on from there"
    )


def log_end(plan: Plan, done: Done, error: BaseException) -> None:
    """The same in the log, and what may help against a failed step."""
    logger.error(ended(plan, done, type(error).__name__))
    if isinstance(error, StepError) and "out of memory" in _whole_text(error):
        logger.error(
            "memory ran out: lower --batch-size, --max-num-batched-tokens or --gpu-memory-utilization; the run may "
            "go on with others"
        )


def log_summary(plan: Plan, summary: Summary, num_layers: int | None) -> None:
    """What was done, in a line; then, for a whole run, what the draft model's configuration must say."""
    what = "all %d samples are written" if summary.complete else "this shard is done, %d samples of all are written"
    logger.info(
        what + " to %s: %d tokens, %.3f GB, %d samples cut, %d skipped; %.1f s, %.0f tokens/s, %.1f MB/s, %.1f s of it "
        "waiting for the disk",
        summary.samples,
        plan.output_dir,
        summary.tokens,
        summary.bytes / _GB,
        summary.truncated,
        summary.skipped,
        summary.seconds,
        summary.tokens_per_second,
        summary.tokens_per_second * summary.bytes / max(summary.tokens, 1) / 1e6,
        summary.stalled,
    )
    from vllm_compat.formats.draft import draft_config  # it imports this package

    if summary.complete and num_layers is not None and (found := draft_config(plan.layer_ids, num_layers)):
        logger.info("for the draft model's config.json: %s", json.dumps(found)[1:-1])
        if plan.format.name in ("speculators", "speculators-fp8"):
            (ids,) = found.values()
            logger.info(
                "for speculators' trainer, which writes other layers there by default: --target-layer-ids %s",
                " ".join(map(str, ids)),
            )


def _whole_text(error: BaseException | None) -> str:
    parts: list[str] = []
    while error and len(parts) < 10:
        parts.append(f"{type(error).__name__} {error}")
        error = error.__cause__ or error.__context__
    return " ".join(parts).replace("OutOfMemory", "out of memory").lower()
