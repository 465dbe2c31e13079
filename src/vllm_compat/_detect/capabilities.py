"""What a vLLM has, by name: for people who read a report, never for choosing code."""

from __future__ import annotations

from vllm_compat._detect.need import Need
from vllm_compat._detect.surface import Symbols

__all__ = ["CAPABILITIES", "capabilities"]

CAPABILITIES = {
    "two_phase_step": Need("vllm.v1.executor.abstract:Executor.sample_tokens"),
    "request_block_hasher": Need("vllm.v1.request:Request.__init__", ("block_hasher",)),
    "eos_token_id_in_request": Need("vllm.v1.request:Request.__init__", ("eos_token_id",)),
    "async_scheduling": Need("vllm.engine.arg_utils:EngineArgs.async_scheduling"),
    "v2_model_runner": Need("vllm.v1.worker.gpu.input_batch:InputBatch"),
    "eagle3_interface": Need("vllm.model_executor.models.interfaces:SupportsEagle3"),
    "native_hidden_state_extraction": Need("vllm.v1.spec_decode.extract_hidden_states"),
    "kimi_k25": Need("vllm.model_executor.models.kimi_k25"),
}


def capabilities(surface: Symbols) -> dict[str, bool]:
    """Name -> whether this vLLM has it."""
    return {name: not need.missing(surface) for name, need in CAPABILITIES.items()}
