"""The conversion itself: one sample at a time, read with proof and written like an extraction's."""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from pathlib import Path

from vllm_compat.convert.config import ConvertConfig
from vllm_compat.convert.layers import Selection, select_layers
from vllm_compat.convert.norm import load_final_norm
from vllm_compat.convert.source import Source, open_source
from vllm_compat.convert.target import Target, open_target
from vllm_compat.errors import StoppedError, UsageError
from vllm_compat.extract.model import read_model_facts
from vllm_compat.extract.progress import ProgressFactory
from vllm_compat.extract.record import Summary
from vllm_compat.extract.revision import find_revision
from vllm_compat.extract.stop import Stop
from vllm_compat.formats import Format, get_format

__all__ = ["convert"]

_GB = 1e9

logger = logging.getLogger(__name__)


def convert(config: ConvertConfig, progress: ProgressFactory | None = None, stop: Stop | None = None) -> Summary:
    """Write a finished run in another format; go on with a conversion that was ended.

    The states are those of the run, bit by bit, but for ``speculators-fp8`` and a ``norm`` that is computed.

    Args:
        config: what to do.
        progress: told of every sample.
        stop: ends it early, after the sample that is under way.

    Raises:
        UsageError: it cannot be done as asked; nothing was written.
        SampleFileError: a file of the run is not what was written.
        JournalError: a journal or a record that was changed.
        StorageError: the file system refused.
        StoppedError: ``stop`` asked for it.
    """
    source = open_source(Path(config.run_dir), partial=config.partial)
    form = get_format(config.format)
    num_layers = _num_layers(source, config.model)
    asked = source.layer_ids if config.layer_ids is None else config.layer_ids
    form.check(asked, num_layers)
    model = config.model
    selection = select_layers(
        asked, source.layer_ids, num_layers, (lambda: load_final_norm(_same_model(source, model))) if model else None
    )
    if form.takes_rows and not source.has_all_rows:
        raise UsageError(
            f"format {form.name} has a row for every sample, those without a file too, and the input that they are in "
            f"is gone or was changed: {source.prepared_data}"
        )
    with open_target(Path(config.output_dir), form, source, asked) as target:
        _log_start(source, target, form, selection, Path(config.output_dir))
        start, kept = time.monotonic(), len(target.done)
        tokens = _convert(source, target, selection, progress, stop or Stop())
        seconds = time.monotonic() - start
        summary = Summary(
            samples=len(target.done),
            tokens=target.done.tokens,
            bytes=target.done.bytes,
            seconds=seconds,
            truncated=source.record.input.get("num_truncated", 0),
            tokens_per_second=tokens / max(seconds, 1e-9),
            output_dir=str(config.output_dir),
            complete=target.done.complete,
            kept=kept,
            skipped=target.done.num_skipped,
            stalled=0.0,
        )
        target.seal(source, asked, num_layers, summary)
    logger.info(
        "%d samples, %.3f GB are in %s; %.1f s, %.1f MB/s",
        summary.samples,
        summary.bytes / _GB,
        summary.output_dir,
        seconds,
        summary.bytes / 1e6 / max(seconds, 1e-9),
    )
    return summary


def _convert(source: Source, target: Target, selection: Selection, progress: ProgressFactory | None, stop: Stop) -> int:
    """Commit what is owed; returns its tokens."""
    tokens = 0
    owed = sum(target.done.owes(entry.index) for entry in source.entries())
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(contextlib.closing(progress(owed))) if progress else None
        stack.enter_context(stop.heeding())
        for entry in stop.until(source.entries()):
            if not target.done.owes(entry.index):
                continue
            if entry.skipped:
                target.store.skip(entry)
                continue
            written = target.store.commit(selection.apply(source.read(entry)), entry.sampled)
            tokens += entry.tokens
            if bar and written:
                bar.advance(entry.tokens, written.bytes)
    if stop.reason:
        raise StoppedError(
            f"stopped by {stop.reason}: {len(target.done)} of {source.num_samples} samples are converted, each whole; "
            "the same command goes on from there",
            reason=stop.reason,
        )
    return tokens


def _num_layers(source: Source, model: str | None) -> int | None:
    known = source.record.num_layers
    return read_model_facts(model or str(source.record.identity["model"])).num_layers if known is None else known


def _same_model(source: Source, model: str) -> str:
    """The folder, unless it is known to be of other weights than the run's."""
    was, now = source.record.identity.get("model_revision"), find_revision(model, {})
    if was and now and was != now:
        if was.startswith("xxh3:") == now.startswith("xxh3:"):
            raise UsageError(f"{model} is revision {now}, the run was made with {was}: its norm may be another")
        logger.warning("the run was made with revision %s; that %s has the same weights is not checked", was, model)
    return model


def _log_start(source: Source, target: Target, form: Format, selection: Selection, folder: Path) -> None:
    free, size = shutil.disk_usage(folder).free, source.done.bytes - target.done.bytes
    logger.info(
        "%s, %d samples of %d, %.3f GB, to %s as %s, layers %s%s; %d are there already",
        source.folder,
        len(source.done),
        source.num_samples,
        source.done.bytes / _GB,
        folder,
        form.name,
        " ".join(map(str, selection.layer_ids)),
        ", norm computed from the last layer" if selection.norm else "",
        len(target.done),
    )
    if free < size:
        logger.warning("%s has %.3f GB free, up to %.3f GB are expected", folder, free / _GB, size / _GB)
