"""The whole job, to durable files: ``vllm_compat.extract.extract``."""

from __future__ import annotations

import json
import time
from pathlib import Path

from benchmarks.bench.cases.base import Figures, Work
from benchmarks.bench.settings import Settings

import vllm_compat
from vllm_compat import Engine
from vllm_compat.extract.config import ExtractConfig
from vllm_compat.extract.record import Summary
from vllm_compat.extract.run import extract as run_extract
from vllm_compat.extract.spent import Spent

__all__ = ["extract"]


class _Clock:
    """Made when the engine is ready and the input is read, just before the first request."""

    def __init__(self, _: int) -> None:
        _Clock.start = time.perf_counter()

    start = 0.0

    def advance(self, tokens: int, size: int, spent: Spent | None = None) -> None:
        """Nothing to tell."""

    def close(self) -> None:
        """Nothing to end."""


def extract(settings: Settings, work: Work) -> Figures:
    """Timed from just before the first request to the seal: every file, the journal and ``run.json`` are durable.

    The check of the input comes before; it is not in the time, and told.
    """
    begun = time.perf_counter()
    with vllm_compat.open_engine(settings.model, layer_ids=settings.layers, **settings.engine()) as engine:
        load = time.perf_counter() - begun
        _run(settings, engine, work.warmup, work.folder / "warmup")
        before = time.perf_counter()
        summary = _run(settings, engine, work.prompts, work.folder / "timed")
        end = time.perf_counter()
    seconds = end - _Clock.start
    if not summary.complete or summary.tokens != settings.tokens or summary.copied:
        raise RuntimeError(f"not the run that was asked for: {summary}")
    facts = {
        "bytes": summary.bytes,
        "mb_per_second": round(summary.bytes / 1e6 / seconds, 1),
        "stalled_seconds": round(summary.stalled, 3),
        "seal_seconds": round(seconds - summary.seconds, 3),
        "before_seconds": round(_Clock.start - before, 3),
    }
    return Figures(settings.tokens, seconds, load, facts)


def _run(settings: Settings, engine: Engine, prompts: list[list[int]], folder: Path) -> Summary:
    folder.mkdir(parents=True)
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in prompts), encoding="utf-8")
    config = ExtractConfig(
        model=settings.model,
        prepared_data=data,
        output_dir=folder / "states",
        layer_ids=settings.layers,
        batch_size=settings.max_num_seqs,
        max_seq_len=settings.length,
    )
    return run_extract(config, engine, progress=_Clock)
