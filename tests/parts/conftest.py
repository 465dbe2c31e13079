"""Shared by the tests of parts: the environment, a configuration without weights, and an engine without a model."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import vllm_compat
from vllm_compat import detect

# An official wheel has no platform on a machine without a GPU; told this one, it plans and schedules as ever.
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

VOCAB, END = 512, 2
MAX_MODEL_LEN = 512
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "bos_token_id": 1,
    "eos_token_id": END,
}


def pytest_report_header() -> str:
    """What ran, so that nobody takes this for more than it is."""
    installed = detect().installed
    found = f"{installed.version_text} ({installed.distribution})" if installed else "none"
    return f"vLLM: {found}; no model and no kernel is run"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's configuration and nothing else."""
    path: Path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.fixture(scope="module")
def open_engine(folder: Path) -> Iterator[Callable[..., Any]]:
    """``open_engine(**options)``: vLLM's EngineCore, scheduler and executor, over a worker without a model."""
    opened: list[Any] = []

    def open_one(**options: Any) -> Any:
        from vllm.v1.executor.abstract import UniProcExecutor  # in this process, where some releases want another

        for engine in opened:
            engine.close()
        defaults = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 64, "block_size": 32}
        worker = {"worker_cls": "echo_worker.EchoWorker", "distributed_executor_backend": UniProcExecutor}
        opened[:] = [vllm_compat.open_engine(str(folder), **{**defaults, **worker, **options})]
        return opened[0]

    yield open_one
    for engine in opened:
        engine.close()


def prompt(length: int, seed: int) -> list[int]:
    """Random token ids, far enough from the last of the vocabulary that counting up meets no special one."""
    return random.Random(f"{length} {seed}").choices(range(3, VOCAB - 200), k=length)


def run(engine: Any) -> dict[str, Any]:
    """Step until nothing waits; request id -> what came of it."""
    done: dict[str, Any] = {}
    while engine.has_unfinished:
        engine.run_step()
        done |= {states.request_id: states for states in engine.get_captured_states()}
    return done


def forwarded(engine: Any) -> dict[str, list[tuple[int, int]]]:
    """Request id -> the spans of positions that the worker was told to forward, in the order they came."""
    (spans,) = engine._executor.collective_rpc(_forwarded)
    return spans  # type: ignore[no-any-return]


def _forwarded(worker: Any) -> Any:
    """Run in the worker."""
    return worker.forwarded
