"""The generator of hidden states that speculators 0.3.0 to 0.4.0.1 had."""

from __future__ import annotations

import time
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from benchmarks.bench.cases.base import Figures, NotAvailableError, Work
from benchmarks.bench.settings import Settings

__all__ = ["speculators"]

_MODULE = "speculators.data_generation.vllm_hidden_states_generator"
_UTILIZATION = 0.8  # its own default
_BLOCK = 128  # vLLM's own on a CPU, unless the others are given another


def speculators(settings: Settings, work: Work) -> Figures:
    """States handed out, and no files: what ``capture`` is to us. Prompts go in by as many as it takes in a call."""
    if find_spec("speculators") is None:
        raise NotAvailableError("speculators is not installed")
    try:
        module: Any = import_module(_MODULE)
    except ImportError as error:
        raise NotAvailableError(f"{type(error).__name__}: {error}") from error
    begun = time.perf_counter()
    notes = _adapt(module, settings)
    generator = module.VllmHiddenStatesGenerator(
        settings.model,
        layer_ids=list(settings.layers),
        max_model_len=settings.length + 1,
        gpu_memory_utilization=_UTILIZATION,
        max_num_batched_tokens=settings.max_num_batched_tokens,
    )
    load = time.perf_counter() - begun
    most = int(module.MAX_NUM_SEQS)

    def generate(prompts: list[list[int]]) -> int:
        size = 0
        for begin in range(0, len(prompts), most):
            for result in generator.generate(prompts[begin : begin + most]):
                for tensor in result["hidden_states"]:
                    if tensor.shape[0] != len(result["input_ids"]):
                        raise RuntimeError(f"{tuple(tensor.shape)} for {len(result['input_ids'])} tokens")
                    size += tensor.nbytes
        return size

    generate(work.warmup)
    start = time.perf_counter()
    size = generate(work.prompts)
    seconds = time.perf_counter() - start
    facts = {"bytes": size, "mb_per_second": round(size / 1e6 / seconds, 1)}
    generator.executor.shutdown()
    return Figures(settings.tokens, seconds, load, facts, notes)


def _adapt(module: Any, settings: Settings) -> tuple[str, ...]:
    """Make it run on a CPU, and as wide as the others; in this process only."""
    import torch

    notes = [f"called with {min(settings.max_num_seqs, settings.prompts)} prompts at a time"]
    if settings.max_num_seqs != module.MAX_NUM_SEQS:
        notes.append(f"MAX_NUM_SEQS {module.MAX_NUM_SEQS} -> {settings.max_num_seqs}")
        module.MAX_NUM_SEQS = settings.max_num_seqs
    if not torch.cuda.is_available():
        # It asks a GPU for free memory and takes a share of it for the KV cache: here, as much as the others have.
        room = int(settings.kv_cache_gib * 2**30 / (_UTILIZATION * module.CACHE_MEMORY_FRACTION))
        module.mem_get_info = lambda: (room, room)
        notes.append("no GPU: mem_get_info replaced")
        size = settings.engine_options.get("block_size", _BLOCK)
        notes.append(f"VLLM_BLOCK_SIZE {module.VLLM_BLOCK_SIZE} -> {size}")
        module.VLLM_BLOCK_SIZE = size
    return tuple(notes)
