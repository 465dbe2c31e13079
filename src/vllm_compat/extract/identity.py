"""What makes two commands the same run: everything that a sample's states or their file depend on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_compat.errors import RunMismatchError
from vllm_compat.extract.config import ExtractConfig
from vllm_compat.extract.inputs import CheckedInput
from vllm_compat.types import LayerId

__all__ = ["check_same_run", "identify"]

_FREE = frozenset(
    {
        "block_size",
        "cpu_offload_gb",
        "data_parallel_size",
        "disable_custom_all_reduce",
        "disable_log_stats",
        "distributed_executor_backend",
        "enable_chunked_prefill",
        "enable_expert_parallel",
        "kv_cache_memory_bytes",
        "max_parallel_loading_workers",
        "num_gpu_blocks_override",
        "shared_states_bytes",
        "swap_space",
    }
)
"""Engine options that move the work about and leave its result: a run may go on with others."""


def identify(
    config: ExtractConfig, layer_ids: tuple[LayerId, ...], checked: CheckedInput, revision: str | None
) -> dict[str, Any]:
    """The settings that identify a run, as ``run.json`` has them; batch size, parallelism and memory are free."""
    found = {
        "model": config.model,
        "model_revision": revision,
        "layer_ids": layer_ids,
        "max_seq_len": config.max_seq_len,
        "dtype": config.dtype,
        "save_dtype": config.save_dtype,
        "format": config.format,
        **({"overlong": config.overlong} if config.overlong != "truncate" else {}),  # as runs before it had it
        "num_samples": checked.num_samples,
        "input_xxh3": checked.xxh3,
        **({"generate": config.generate, "sampling": dict(config.sampling)} if config.generate else {}),
        "engine_options": {name: value for name, value in config.engine_options.items() if name not in _FREE},
    }
    plain: dict[str, Any] = json.loads(json.dumps(found, default=str))
    return plain


def check_same_run(folder: Path, recorded: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Refuse to mix two runs in one folder. A revision that was not known is like any other.

    Raises:
        RunMismatchError: with the fields that differ.
    """
    fields = [name for name in {**asked, **recorded} if recorded.get(name) != asked.get(name)]
    if recorded.get("model_revision") is None or asked.get("model_revision") is None:
        fields = [name for name in fields if name != "model_revision"]
    if fields:
        differences = "; ".join(f"{name} is {recorded.get(name)!r} there, {asked.get(name)!r} here" for name in fields)
        raise RunMismatchError(
            f"{folder} holds a run of other settings: {differences}. Give that run's settings to go on with it, or "
            "another output folder",
            fields=fields,
        )
