"""Which of vLLM's model runners would run a model: as far as the source and the environment tell before a start."""

from __future__ import annotations

import ast
import os
from collections.abc import Sequence
from importlib.util import find_spec

from vllm_compat.doctor.source import Source
from vllm_compat.doctor.statement import Statement

__all__ = ["judge_runner"]

_V2 = "v1/worker/gpu/input_batch.py"
_CPU_WORKER = "v1/worker/cpu_worker.py"
_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
_CONFIG = "vllm.config.vllm"
_MODELS_OF_V2 = "DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES"
_BY_MODEL = "_is_default_v2_model_runner_model"


def judge_runner(source: Source, architectures: Sequence[str], *, cpu: bool) -> Statement:
    """``V1``, ``V2``, or None where vLLM decides at its start. Either is served: only the order of rows differs."""
    value, text, evidence = _judge(source, architectures, cpu)
    return Statement("runner", value, text, evidence)


def _judge(source: Source, architectures: Sequence[str], cpu: bool) -> tuple[str | None, str, str]:
    if source.find_text(_V2, "") is None:
        return "V1", "V1, the only one that this vLLM has", f"{_V2}: not there"
    if cpu and source.find_text(_CPU_WORKER, "use_v2_model_runner") is None:
        return "V1", "V1, the only one that its CPU worker knows", f"{_CPU_WORKER}: no use_v2_model_runner"
    known, asked = source.find_text("envs.py", _VARIABLE), os.environ.get(_VARIABLE)
    if known and asked in ("0", "1"):
        return f"V{int(asked) + 1}", f"V{int(asked) + 1}, as {_VARIABLE}={asked} says", known
    config = source.find_class(_CONFIG, "VllmConfig")
    decides = source.method(config, "use_v2_model_runner") if config else None
    if decides is None:
        return "V1", f"V1, unless {_VARIABLE}=1 asks for V2", known or f"{_CONFIG}: does not decide"
    place = source.place(decides[0].home, decides[1])
    if find_spec("triton") is None:
        return "V1", "V1: V2 needs Triton, and that is not installed", place
    by_model = source.method(decides[0], _BY_MODEL)
    if by_model is None:
        return None, "decided at start: V2 where Triton works, V1 otherwise", place
    place = source.place(by_model[0].home, by_model[1])
    if not set(architectures) & _listed(source) and "is_moe" not in ast.unparse(by_model[1]):
        return "V1", f"V1: the model is not in {_MODELS_OF_V2}", place
    return None, "decided at start, by the model: V2 for some where Triton works, V1 otherwise", place


def _listed(source: Source) -> set[str]:
    found = source.assignments(_CONFIG, _MODELS_OF_V2)
    return {str(n.value) for node in found for n in ast.walk(node.value) if isinstance(n, ast.Constant)}
