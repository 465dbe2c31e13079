"""Several replicas of the model at one run, on a Ray cluster; what a lost one had is done by the others."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from functools import partial
from pathlib import Path

from vllm_compat import engine as engines
from vllm_compat.errors import CaptureError, StoppedError, UsageError
from vllm_compat.extract.config import ExtractConfig
from vllm_compat.extract.dispatch import Dispatch
from vllm_compat.extract.done import Done, read_done
from vllm_compat.extract.estimate import estimate
from vllm_compat.extract.folder import begin_run
from vllm_compat.extract.journal import journal_name
from vllm_compat.extract.plan import Plan, make_plan
from vllm_compat.extract.progress import ProgressFactory
from vllm_compat.extract.ray_pool import OpenEngine, Orders, RayPool, cluster, import_ray
from vllm_compat.extract.record import Summary, read_record
from vllm_compat.extract.report import ended, log_plan, log_summary
from vllm_compat.extract.run import extract
from vllm_compat.extract.stop import Stop

__all__ = ["SHARDS_A_REPLICA", "extract_on_ray"]

SHARDS_A_REPLICA = 8
"""More let the last replica end sooner after the first; each is another look through input and journals."""

logger = logging.getLogger(__name__)


def extract_on_ray(
    config: ExtractConfig,
    replicas: int,
    progress: ProgressFactory | None = None,
    stop: Stop | None = None,
    tokens_per_second: float | None = None,
    open_engine: OpenEngine | None = None,
) -> Summary:
    """``extract`` with several replicas of the model on a Ray cluster, each with GPUs of its own.

    Args:
        config: what to do, without a ``shard``. Model, input and output folder are where every node finds them.
        replicas: how many.
        progress: told of every sample.
        stop: ends the run early; what is under way is finished first.
        tokens_per_second: of all replicas together, for the estimate; None when not known.
        open_engine: opens a replica's engine, in the place of ``vllm_compat.open_engine``.

    The samples are divided into shards, more than there are replicas. When a replica is lost, its shard is done by
    another, and a new one is started in its place.

    Returns:
        Of the whole run; ``seconds`` and ``tokens_per_second`` are from the start of the replicas to the end of the
        last one's work, with the loading of the model.

    Raises:
        UsageError: also without Ray, or with a cluster that is too small.
        ReplicaError: replicas were lost again and again.
        VllmCompatError: as ``extract``.
    """
    stop = stop or Stop()
    if replicas < 1:
        raise UsageError(f"replicas must be at least 1, found {replicas}")
    if config.shard != (0, 1):
        raise UsageError(
            f"--replicas divides the samples itself, and --shard {config.shard[0]}/{config.shard[1]} is given, too. "
            "Give one of them"
        )
    config = dataclasses.replace(config, engine_options=dict(config.engine_options), sampling=dict(config.sampling))
    ray = import_ray()
    plan = make_plan(config)
    count = min(plan.input.num_samples, SHARDS_A_REPLICA * replicas)
    before = begin_run(plan, count)
    expected = estimate(plan, config, before, tokens_per_second, division=count)
    log_plan(plan, config, before, expected)
    expected.require_room()
    if before.complete:  # nothing to be done but the seal, perhaps
        return extract(config, stop=stop)
    orders = Orders(
        config=config,
        count=count,
        layer_ids=plan.layer_ids,
        max_model_len=plan.max_model_len,
        folder=os.getcwd(),  # noqa: PTH109 - told as text
        open_engine=open_engine or engines.open_engine,
    )
    with cluster(ray):
        pool = RayPool(ray, orders, replicas)
        try:
            found = _work(pool, plan, before, orders, replicas, progress, stop)
        finally:
            pool.close()
    log_summary(plan, found, plan.num_layers)
    return found


def _work(
    pool: RayPool,
    plan: Plan,
    before: Done,
    orders: Orders,
    replicas: int,
    progress: ProgressFactory | None,
    stop: Stop,
) -> Summary:
    """From the rehearsal to the last replica's end."""
    if orders.config.rehearsal:
        logger.info("rehearsal, in a process of the cluster (--no-rehearsal)")
        if done := pool.rehearse():
            logger.info("rehearsal: %s", done)
    shards = [shard for shard in range(orders.count) if before.owed((shard, orders.count))]
    logger.info("%d shards for %d replicas", len(shards), min(replicas, len(shards)))
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(contextlib.closing(progress(before.owed((0, 1))))) if progress else None
        dispatch = Dispatch(
            pool, shards, orders.count, replicas, partial(_journal_size, plan.output_dir, orders.count), stop, bar
        )
        stack.enter_context(stop.heeding())
        all_done = dispatch.run()
    after, _ = read_done(plan.output_dir, plan.input.num_samples)
    if not all_done:
        raise StoppedError(ended(plan, after, stop.reason), reason=stop.reason)
    return _summary(plan, before, after, dispatch.summaries, time.monotonic() - start)


def _journal_size(folder: Path, count: int, shard: int) -> int:
    try:
        return (folder / journal_name((shard, count))).stat().st_size
    except FileNotFoundError:
        return 0


def _summary(plan: Plan, before: Done, after: Done, parts: list[Summary], seconds: float) -> Summary:
    """Of the whole run.

    Raises:
        CaptureError: every shard was done, and now not every sample is.
    """
    record = read_record(plan.output_dir)
    if not (after.complete and record and record.complete):
        missing = ", ".join(map(str, after.first_owed())) or "none"
        raise CaptureError(
            f"{plan.output_dir}: every shard was done, and the run is not complete: samples that are gone: {missing}. "
            "The same command fills in and ends the run"
        )
    return Summary(
        samples=len(after),
        tokens=after.tokens,
        bytes=after.bytes,
        seconds=seconds,
        truncated=plan.input.num_truncated,
        overlong=plan.input.num_left_out,
        copied=sum(part.copied for part in parts),
        tokens_per_second=(after.tokens - before.tokens) / max(seconds, 1e-9),
        output_dir=str(plan.output_dir),
        complete=True,
        kept=len(before),
        skipped=after.num_skipped,
        stalled=sum(part.stalled for part in parts),
    )
