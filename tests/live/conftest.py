"""Shared by the live tests: the environment, the models, and engines that are opened once."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import models
import pytest

import vllm_compat
from vllm_compat import detect

# vLLM reads these once, at the first engine. A GPU host sets VLLM_COMPAT_LIVE=gpu.
ON_GPU = os.environ.get("VLLM_COMPAT_LIVE") == "gpu"
RELEASE = detect().release
KV_CACHE_BYTES = 2 << 30
# What a command is told of a GPU's memory.
GPU_FLAGS = [
    *("--gpu-memory-utilization", "0.05", "--engine-option", f"kv_cache_memory_bytes={KV_CACHE_BYTES}")
] if ON_GPU else []  # fmt: skip
RANKS = int(os.environ.get("VLLM_COMPAT_LIVE_RANKS", "1"))  # the whole suite under tensor parallel
CPU = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
AMX = "amx_tile" in CPU
# Faults of some CPUs alone, in float32, which the models here are in.
ELSEWHERE = {"experts": "avx512f" in CPU and not AMX, "experts-amx": not AMX, "mla-amx": not AMX}
FAULTS = {
    name: words for name, words in (RELEASE.faults if RELEASE and not ON_GPU else {}).items() if not ELSEWHERE.get(name)
}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Newer CPU builds else give even one rank a process of its own, whose start takes longer than the tests; the multiproc
# executor has test_tensor_parallel.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
if not ON_GPU:
    # One core for each rank; by default each of two ranks wants a NUMA node of its own, and one rank takes one core.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    # Where vLLM itself binds nothing (from 0.20 on, in this process), threads of two suites on two cores would wait for
    # each other at every barrier.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Ranks that wait for work ask for it without end; on two cores they kept everything else from them for good, once.
    os.environ.setdefault("VLLM_SLEEP_WHEN_IDLE", "1")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # else vLLM compiles a helper of tensor parallel even when eager
if "mla" in FAULTS:
    os.environ["VLLM_MLA_DISABLE"] = "1"

if ON_GPU:
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # the tests touch CUDA, after which no fork works
# GPU kernels use TF32, far from 1e-5; neighbouring layers of these models are 0.3 apart, so a wrong one still shows.
FLOAT32_ERROR = 2e-2 if ON_GPU else 1e-5


@pytest.fixture(scope="session", autouse=True)
def _no_process_for_each_architecture() -> Iterator[None]:
    """vLLM looks at each model class in a process of its own, which imports all of vLLM again: a third of the suite."""
    from vllm.model_executor.models import registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_run_in_subprocess", lambda look: look(), raising=False)
        yield


def skip_if_faulty(*faults: str) -> None:
    """Skip where the matrix says that the release's own kernels are wrong."""
    for fault in faults:
        if fault in FAULTS:
            pytest.skip(f"vLLM {detect().version}: {FAULTS[fault]}")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``model("llama")``: the folder of a model, made at the first call."""
    folder = Path(os.environ.get("VLLM_COMPAT_MODELS") or tmp_path_factory.mktemp("models"))
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if ON_GPU and name == "smollm2":
            pytest.skip("the GPU host has no SmolLM2")
        if ON_GPU and name in ("deepseek_v3", "kimi_k25"):
            pytest.skip("the MLA kernels of GPUs take no float32")
        if name not in made:
            made[name] = getattr(models, name)(folder)
        return made[name]

    return make


@pytest.fixture(scope="module")
def open_engine(model: Callable[[str], Path]) -> Iterator[Callable[..., Any]]:
    """``open_engine("llama", layer_ids=...)``: one engine at a time, kept while the same one is asked for again."""
    now: dict[str, Any] = {}

    def open_or_reuse(name: str, **options: Any) -> Any:
        if "mla-amx" in FAULTS and name in ("deepseek_v3", "kimi_k25"):
            options["attention_backend"] = "CPU_MLA"
        key = repr((name, sorted(options.items())))
        if now.get("key") != key or now["engine"].closed:
            close()
            now.update(key=key, engine=vllm_compat.open_engine(str(model(name)), **{**engine_options(), **options}))
        return now["engine"]

    def close() -> None:
        if now:
            engine = now.pop("engine")
            now.clear()
            engine.close()

    yield open_or_reuse
    close()


def engine_options() -> dict[str, Any]:
    """What every engine of these tests is opened with."""
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 64}
    options["tensor_parallel_size"] = RANKS
    if ON_GPU:  # with a size of its own for the KV cache vLLM does not measure, and suites may share GPUs
        options.update(gpu_memory_utilization=0.05, kv_cache_memory_bytes=KV_CACHE_BYTES)
    if "worker-process" in FAULTS and RANKS == 1:
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        options["distributed_executor_backend"] = UniProcExecutor
    return options


def prompt(length: int, seed: int, vocab: int = models.VOCAB) -> list[int]:
    """Random token ids; none of them ends an answer."""
    return random.Random(f"{length} {seed}").choices(range(3, vocab), k=length)


def text(folder: Path, length: int, topic: str = "bitwise") -> list[int]:
    """Real English for a trained model: noise makes it amplify every rounding error tenfold."""
    from pydoc_data.topics import topics

    from transformers import AutoTokenizer

    ids: list[int] = AutoTokenizer.from_pretrained(folder)(topics[topic])["input_ids"][:length]
    assert len(ids) == length
    return ids


def run(engine: Any, prompts: dict[str, list[int]], **options: Any) -> dict[str, Any]:
    """Request id -> captured states, each seen exactly once."""
    for request_id, token_ids in prompts.items():
        engine.make_request(token_ids, request_id=request_id, **options)
    captured: dict[str, Any] = {}
    while engine.has_unfinished:
        engine.run_step()
        for states in engine.get_captured_states():
            assert states.request_id not in captured
            captured[states.request_id] = states
    assert captured.keys() == prompts.keys()
    return captured
