"""States captured and handed out, and no files: ``open_engine`` and ``get_captured_states``."""

from __future__ import annotations

import time

from benchmarks.bench.cases.base import Figures, Work
from benchmarks.bench.settings import Settings

import vllm_compat
from vllm_compat import Engine

__all__ = ["capture"]


def capture(settings: Settings, work: Work) -> Figures:
    begun = time.perf_counter()
    with vllm_compat.open_engine(settings.model, layer_ids=settings.layers, **settings.engine()) as engine:
        load = time.perf_counter() - begun
        _run(engine, work.warmup, settings)
        start = time.perf_counter()
        size = _run(engine, work.prompts, settings)
        seconds = time.perf_counter() - start
    return Figures(settings.tokens, seconds, load, {"bytes": size, "mb_per_second": round(size / 1e6 / seconds, 1)})


def _run(engine: Engine, prompts: list[list[int]], settings: Settings) -> int:
    """All prompts once; the bytes of their states, which are dropped as they come."""
    waiting: dict[str, list[int]] = {}
    size = 0
    for token_ids in prompts:
        waiting[str(len(waiting))] = token_ids
        engine.make_request(token_ids, request_id=str(len(waiting) - 1), ignore_eos=True)
    while waiting:
        engine.run_step()
        for states in engine.get_captured_states(wait=not engine.has_unfinished):
            wanted = (len(waiting.pop(states.request_id)), engine.hidden_size)
            for tensor in states.hidden_states:
                if tuple(tensor.shape) != wanted:
                    raise RuntimeError(f"{states.request_id}: {tuple(tensor.shape)}, wanted {wanted}")
                size += tensor.nbytes
        if waiting and not engine.has_unfinished:
            raise RuntimeError(f"{len(waiting)} prompts gave no states")
    return size
