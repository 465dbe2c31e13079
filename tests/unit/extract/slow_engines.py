"""Engines that replicas open, in processes of their own: importable there as a module."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from vllm_compat.errors import UsageError
from vllm_compat.testing import FakeEngine
from vllm_compat.types import StepResult

__all__ = ["fail", "open_slow", "refuse"]

PIDS = "VLLM_COMPAT_TEST_PIDS"
"""Names the folder in which each process leaves a file of its number."""


class SlowEngine(FakeEngine):
    """Takes its time for a step."""

    def run_step(self, meanwhile: Any = None) -> StepResult:
        time.sleep(0.02)
        return super().run_step(meanwhile)


def open_slow(model: str, **options: Any) -> FakeEngine:
    """As ``vllm_compat.open_engine``."""
    assert Path(model).is_dir()
    Path(os.environ[PIDS], str(os.getpid())).touch()
    return SlowEngine(
        options["layer_ids"],
        num_layers=8,
        max_model_len=options["max_model_len"],
        max_num_seqs=2,
        make_tensor=np.array,
    )


def refuse(model: str, **_: Any) -> FakeEngine:
    """An option that vLLM does not have."""
    raise UsageError(f"vLLM refuses the model {model}")


def fail(model: str, **_: Any) -> FakeEngine:
    """An error that is nobody's."""
    raise RuntimeError(f"CUDA error: out of memory with {model}")
