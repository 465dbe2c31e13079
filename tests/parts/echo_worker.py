"""A worker for vLLM's own executor that has no model: the next token is the last one plus one.

It stands where kernels would be needed, and nowhere else: it follows the scheduler's output as a runner does, and
refuses one that no runner could follow.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.worker.worker_base import WorkerBase

from vllm_compat._adapters.rows import first_position

__all__ = ["BLOCKS", "LAYERS", "EchoWorker"]

_ARRAYS = "ndarray" in str(ModelRunnerOutput.__annotations__["sampled_token_ids"])  # in 0.11.1 and 0.11.2
LAYERS = [f"model.layers.{n}.self_attn.attn" for n in range(4)]
BLOCKS = 20  # room in the KV cache, in blocks of the whole model


class EchoWorker(WorkerBase):
    """Four attention layers to plan for, and memory for ``BLOCKS`` blocks."""

    def init_device(self) -> None:
        self._tokens: dict[str, list[int]] = {}
        self._sampled: Any = None
        self.forwarded: dict[str, list[tuple[int, int]]] = {}

    def load_model(self, **options: Any) -> None: ...

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        fields = {f.name for f in dataclasses.fields(FullAttentionSpec)}
        spec = FullAttentionSpec(
            block_size=self.cache_config.block_size,
            num_kv_heads=2,
            head_size=32,
            dtype=self.model_config.dtype,
            **({"use_mla": False} if "use_mla" in fields else {}),  # 0.11.0; goes when that does
        )
        return dict.fromkeys(LAYERS, spec)

    def determine_available_memory(self) -> int:
        return BLOCKS * sum(spec.page_size_bytes for spec in self.get_kv_cache_spec().values())

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        self._config = kv_cache_config

    def initialize_cache(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None: ...

    def compile_or_warm_up_model(self) -> Any:
        from vllm.v1.worker import worker_base

        times = getattr(worker_base, "CompilationTimes", None)  # a number before 0.18
        return times(0.0, 0.0) if times else 0.0

    def execute_model(self, scheduler_output: Any) -> Any:
        assert self._sampled is None, "the last step was not sampled"
        for request_id in scheduler_output.finished_req_ids:
            self._tokens.pop(request_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            self._tokens[new.req_id] = list(new.prompt_token_ids)
        if not scheduler_output.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        starts = first_position(scheduler_output)
        sampled: dict[str, list[int]] = {}
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            tokens, start = self._tokens[request_id], starts[request_id]
            assert start + count <= len(tokens), "tokens are scheduled that nobody has sampled"
            self.forwarded.setdefault(request_id, []).append((start, start + count))
            sampled[request_id] = [(tokens[-1] + 1) % self.vocab_size] if start + count == len(tokens) else []
            tokens += sampled[request_id]
        self._sampled = dataclasses.replace(
            EMPTY_MODEL_RUNNER_OUTPUT,
            req_ids=list(sampled),
            req_id_to_index={request_id: n for n, request_id in enumerate(sampled)},
            sampled_token_ids=[np.array(ids, dtype=np.int64) if _ARRAYS else ids for ids in sampled.values()],
        )
        return None if hasattr(Executor, "sample_tokens") else self.sample_tokens(None)

    def sample_tokens(self, grammar_output: Any) -> Any:
        output, self._sampled = self._sampled, None
        return output
