"""The extraction itself: samples in, an engine's steps, one file out for each sample."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Generator, Iterator

from vllm_compat import engine as engines
from vllm_compat.engine import Engine
from vllm_compat.errors import CaptureError
from vllm_compat.extract.config import ExtractConfig
from vllm_compat.extract.inputs import Sample, read_samples
from vllm_compat.extract.plan import Plan, check_engine, make_plan
from vllm_compat.extract.progress import ProgressFactory
from vllm_compat.extract.record import RUN_FILE, Summary, log_plan, log_summary, versions, write_run
from vllm_compat.extract.writer import SAMPLE_FILES, SampleWriter
from vllm_compat.types import CapturedStates

__all__ = ["captured", "extract"]

logger = logging.getLogger(__name__)


def extract(config: ExtractConfig, engine: Engine | None = None, progress: ProgressFactory | None = None) -> Summary:
    """Write the hidden states of every sample to a file of its own.

    Args:
        config: what to do.
        engine: an engine of the caller's that captures the same layers, left open; the options for opening one are
            unused then. One is opened, and closed, when left out.
        progress: told of every file.

    Files appear as samples finish; file ``i`` is sample ``i``'s. ``run.json`` says ``"complete": true`` only once all
    are written. Whatever ends a run early, the files that are there are whole.

    Raises:
        UsageError, InputError: something cannot be done as asked; nearly always before the model is loaded.
        CaptureError: states that are missing or not the sample's.
        VllmCompatError: what ``open_engine`` and the engine raise, or a file that cannot be written.
    """
    plan = make_plan(config, engine)
    write_run(plan, config)
    log_plan(plan, config)
    with contextlib.ExitStack() as stack:
        if engine is None:
            options = config.open_engine_options(plan.max_model_len)
            engine = stack.enter_context(engines.open_engine(config.model, layer_ids=plan.layer_ids, **options))
        check_engine(plan, engine)
        summary = _extract(plan, config, engine, progress)
        write_run(plan, config, summary)
    log_summary(summary)
    return summary


def captured(
    engine: Engine, samples: Iterator[Sample], ahead: int
) -> Generator[tuple[Sample, CapturedStates], None, None]:
    """Run samples through the engine, at most ``ahead`` at a time; yields each with its states as it finishes.

    Requests that are still under way when the caller stops are aborted.

    Raises:
        CaptureError: states of a request that is not waited for, or none for one that has ended.
    """
    waiting: dict[str, Sample] = {}
    try:
        while True:
            while len(waiting) < ahead and (sample := next(samples, None)):
                request_id = f"sample-{sample.index}"
                engine.make_request(sample.token_ids, request_id=request_id)
                waiting[request_id] = sample
            if not waiting:
                return
            finished = engine.run_step().finished
            for states in engine.get_captured_states():
                owner = waiting.pop(states.request_id, None)
                if owner is None:
                    raise CaptureError(f"states came for {states.request_id!r}, which this run does not wait for")
                yield owner, states
            lost = [i for i in waiting if i in finished or not engine.has_unfinished]
            if lost:
                raise CaptureError(
                    f"{len(lost)} request(s) ended without states, first {lost[0]} of line {waiting[lost[0]].line} "
                    f"(reason: {finished.get(lost[0], 'not given')})"
                )
    finally:
        if waiting and not engine.closed:
            engine.abort(*waiting)


def _extract(plan: Plan, config: ExtractConfig, engine: Engine, progress: ProgressFactory | None) -> Summary:
    """The loop over all samples, and the proof that each was written once."""
    total = plan.input.num_samples
    writer = SampleWriter(
        plan.output_dir, plan.layer_ids, engine.hidden_size, config.save_dtype, {"model": config.model, **versions()}
    )
    written = bytearray(total)
    tokens = size = 0
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        samples = stack.enter_context(contextlib.closing(read_samples(plan.input)))
        bar = stack.enter_context(contextlib.closing(progress(total))) if progress else None
        stream = stack.enter_context(contextlib.closing(captured(engine, samples, 2 * config.batch_size)))
        try:
            for sample, states in stream:
                file_size = writer.write(sample, states)
                written[sample.index] += 1
                tokens, size = tokens + len(sample.token_ids), size + file_size
                if bar:
                    bar.advance(len(sample.token_ids), file_size)
            _verify(plan, written)
        except BaseException as error:
            logger.error(
                "stopped by %s: %d of %d samples are written to %s, each whole; %s there says complete: false",
                type(error).__name__,
                sum(map(bool, written)),
                total,
                plan.output_dir,
                RUN_FILE,
            )
            raise
    seconds = time.monotonic() - start
    return Summary(
        samples=total,
        tokens=tokens,
        bytes=size,
        seconds=seconds,
        truncated=plan.input.num_truncated,
        tokens_per_second=tokens / max(seconds, 1e-9),
        output_dir=str(plan.output_dir),
    )


def _verify(plan: Plan, written: bytearray) -> None:
    wrong = [index for index, times in enumerate(written) if times != 1]
    files = sum(1 for _ in plan.output_dir.glob(SAMPLE_FILES))
    if wrong or files != len(written):
        raise CaptureError(
            f"{plan.output_dir} has {files} files for {len(written)} samples; samples not written exactly once: "
            f"{', '.join(map(str, wrong[:10])) or 'none'}"
        )
