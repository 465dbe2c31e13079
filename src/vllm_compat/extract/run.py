"""The extraction itself: samples in, an engine's steps, one file out for each sample."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any

from vllm_compat import engine as engines
from vllm_compat.engine import Engine
from vllm_compat.errors import CaptureError, StepError, StoppedError
from vllm_compat.extract.answers import request_options
from vllm_compat.extract.config import ExtractConfig
from vllm_compat.extract.copies import copy_duplicates
from vllm_compat.extract.estimate import estimate
from vllm_compat.extract.folder import RunFolder, open_run
from vllm_compat.extract.inputs import Sample
from vllm_compat.extract.maker import SampleMaker
from vllm_compat.extract.plan import Job, Plan, check_engine, make_plan
from vllm_compat.extract.prefixes import Forwarded, neighbours
from vllm_compat.extract.progress import ProgressFactory
from vllm_compat.extract.record import Effort, Summary, versions
from vllm_compat.extract.rehearsal import rehearse
from vllm_compat.extract.report import ended, log_end, log_plan, log_summary
from vllm_compat.extract.spent import Spent
from vllm_compat.extract.stop import Stop
from vllm_compat.extract.writer import SampleWriter
from vllm_compat.extract.writers import Writers
from vllm_compat.types import CapturedStates

__all__ = ["captured", "extract", "maker_of", "options_of"]

_TOKENS_AT_ONCE = 1 << 15
"""What is queued beside a step, or twice the tokens of the largest step so far: the next one must be full."""

logger = logging.getLogger(__name__)


def extract(
    config: ExtractConfig,
    engine: Engine | None = None,
    progress: ProgressFactory | None = None,
    stop: Stop | None = None,
    tokens_per_second: float | None = None,
) -> Summary:
    """Write the hidden states of every sample to a file of its own; go on with a run that was ended.

    Args:
        config: what to do.
        engine: an engine of the caller's that captures the same layers, left open; the options for opening one are
            unused then. One is opened, and closed, when left out, unless nothing is to be done.
        progress: told of every sample.
        stop: ends the run early; what is under way is finished first.
        tokens_per_second: of this process, for the estimate; None when not known.

    Files appear as samples finish; file ``i`` is sample ``i``'s. ``run.json`` says ``"complete": true`` only once all
    are written. Whatever ends a run early, what is done is whole and stays done.

    Raises:
        UsageError, InputError: something cannot be done as asked; nearly always before the model is loaded.
        RehearsalError: the model's first layers could not be run; it was not loaded.
        CaptureError: states that are missing or not the sample's.
        JournalError: a journal in the output folder that was changed.
        StorageError: the file system refused.
        StoppedError: ``stop`` asked for it.
        VllmCompatError: what ``open_engine`` and the engine raise.
    """
    plan = make_plan(config, engine)
    with open_run(plan, config) as run:
        expected = estimate(plan, config, run.done, tokens_per_second)
        log_plan(plan, config, run.done, expected)
        expected.require_room()
        effort, num_layers = Effort(), plan.num_layers
        if run.needs_engine():
            with contextlib.ExitStack() as stack:
                if engine is None:
                    if config.rehearsal:
                        rehearse(config, plan)
                    options = config.open_engine_options(plan.max_model_len)
                    engine = stack.enter_context(engines.open_engine(config.model, layer_ids=plan.layer_ids, **options))
                check_engine(plan, engine)
                num_layers = engine.num_layers
                effort = _extract(plan, config, run, engine, progress, stop or Stop())
        if run.num_owed:
            effort += copy_duplicates(plan, config, run, progress, stop or Stop())
        summary = run.seal(effort, num_layers)
    log_summary(plan, summary, num_layers)
    return summary


def captured(
    engine: Engine,
    samples: Iterator[Sample],
    ahead: int,
    options_of: Callable[[Sample], dict[str, Any]] = lambda _: {},
    forwarded: Callable[[int], None] = lambda _: None,
    spent: Spent | None = None,
    take: Callable[[Sample, CapturedStates], None] | None = None,
) -> Generator[tuple[Sample, CapturedStates], None, None]:
    """Run samples through the engine, at most ``ahead`` at a time; yields each with its states as it finishes.

    Args:
        engine: captures the layers.
        samples: to run; taken as there is room.
        ahead: the most that are under way, those included that wait for the caller.
        options_of: what ``make_request`` is told of a sample beside its tokens.
        forwarded: told of the tokens of each step.
        spent: the time of steps, and of waiting for states, is added to it.
        take: gets each sample with its states, which are not yielded then. It is called beside a step.

    While the device is at work on a step, samples are read and queued, and the states of the last step's taken: between
    two steps there is next to nothing to do, and the less is done there by other threads, too, the sooner the device
    has the next one. Requests that are still under way when the caller stops are aborted.

    Raises:
        CaptureError: states of a request that is not waited for, or none for one that has ended.
    """
    waiting: dict[str, Sample] = {}
    ended: dict[str, str] = {}
    ready: list[CapturedStates] = []
    room = _TOKENS_AT_ONCE
    spent = spent or Spent()

    def admit() -> None:
        left = room
        while left > 0 and len(waiting) - len(ended) < ahead and (sample := next(samples, None)):
            request_id = f"sample-{sample.index}"
            engine.make_request(sample.token_ids, request_id=request_id, **options_of(sample))
            waiting[request_id] = sample
            left -= len(sample.token_ids)

    def finished() -> Iterator[tuple[Sample, CapturedStates]]:
        while ready:
            states = ready.pop(0)
            owner = waiting.pop(states.request_id, None)
            if owner is None:
                raise CaptureError(f"states came for {states.request_id!r}, which this run does not wait for")
            ended.pop(states.request_id, None)
            yield owner, states

    def meanwhile() -> None:
        ready.extend(engine.get_captured_states(wait=False))
        if take:
            for sample, states in finished():
                take(sample, states)
        admit()

    try:
        admit()
        while waiting:
            due = set(ended)  # states may come one step after their request's end, so that the device need not wait
            with spent.on("steps"):
                step = engine.run_step(meanwhile)
            tokens = sum(step.num_scheduled_tokens.values())
            forwarded(tokens)
            room = max(room, 2 * tokens)
            ended.update((i, reason) for i, reason in step.finished.items() if i in waiting)
            if last := not engine.has_unfinished:
                due.update(waiting)
                with spent.on("states"):
                    ready.extend(engine.get_captured_states())
            elif not tokens:
                due.clear()  # where nothing is forwarded, nothing is handed out
            for sample, states in finished():
                if take:
                    take(sample, states)
                else:
                    yield sample, states
            if lost := [i for i in waiting if i in due]:
                raise CaptureError(
                    f"{len(lost)} request(s) ended without states, first {lost[0]} of line {waiting[lost[0]].line} "
                    f"(reason: {ended.get(lost[0], 'not given')})"
                )
            if last:
                admit()
    finally:
        if waiting and not engine.closed:
            engine.abort(*waiting)


def maker_of(job: Job, config: ExtractConfig, engine: Engine) -> SampleMaker:
    """What makes samples of the engine's states."""
    about = {"model": config.model, "model_revision": job.revision or "unknown", **versions()}
    generate = bool(config.generate)
    return SampleMaker(job.layer_ids, engine.hidden_size, config.save_dtype, generate=generate, about=about)


def options_of(job: Job, config: ExtractConfig, engine: Engine) -> Callable[[Sample], dict[str, Any]]:
    """What tells for a sample how it is to be run, beside its tokens."""
    return partial(request_options, config, max_model_len=min(job.max_model_len, engine.max_model_len))


def _extract(
    plan: Plan, config: ExtractConfig, run: RunFolder, engine: Engine, progress: ProgressFactory | None, stop: Stop
) -> Effort:
    """The loop over the samples that are owed."""
    writer = SampleWriter(run.store, maker_of(plan, config, engine), config.on_nonfinite)
    writers = Writers(writer.write, threads=config.writers, max_pending_bytes=config.max_pending_bytes)
    start, tokens, spent = time.monotonic(), 0, Spent()
    with contextlib.ExitStack() as stack:
        bar = (
            stack.enter_context(contextlib.closing(progress(run.num_owed - run.num_owed_duplicates)))
            if progress
            else None
        )

        def tell() -> None:
            nonlocal tokens
            for entry in writers.written():
                tokens += entry.tokens
                if entry.skipped:
                    logger.warning("sample %d is left out, %s", entry.index, entry.skipped)
                if bar:
                    bar.advance(entry.tokens, entry.bytes, spent)

        def write(sample: Sample, states: CapturedStates) -> None:
            with spent.on("writers"):
                writers.submit(sample, states)
            tell()

        samples = stack.enter_context(contextlib.closing(run.owed_samples()))
        stack.enter_context(stop.heeding())
        due = stop.until(neighbours(samples) if config.share_prefixes else samples)
        forwarded = Forwarded()
        options = options_of(plan, config, engine)
        running = captured(engine, due, 2 * config.batch_size, options, forwarded.add, spent, write)
        try:
            list(stack.enter_context(contextlib.closing(running)))  # all of it goes to write, and nothing is left
            with spent.on("last_files"):
                writers.close()
            tell()
        except BaseException as error:
            if isinstance(error, CaptureError):
                run.store.refuse()
            with contextlib.suppress(Exception):
                writers.close()
            log_end(plan, run.done, error)
            if stop.reason and isinstance(error, StepError):  # the signal may have gone to the engine's workers, too
                raise StoppedError(ended(plan, run.done, stop.reason), reason=stop.reason) from error
            raise
    if stop.reason:
        raise StoppedError(ended(plan, run.done, stop.reason), reason=stop.reason)
    if config.share_prefixes:
        forwarded.log(tokens)
    seconds = time.monotonic() - start
    logger.info("of %.1f s: %s", seconds, spent.told(seconds))
    return Effort(tokens, seconds, writers.stalled)
