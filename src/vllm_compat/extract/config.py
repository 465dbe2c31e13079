"""What one extraction is asked to do."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from vllm_compat.errors import UsageError
from vllm_compat.types import LayerId

__all__ = ["ON_NONFINITE", "OVERLONG", "SAVE_DTYPES", "ExtractConfig", "OnNonFinite", "Overlong", "SaveDtype"]

SaveDtype: TypeAlias = Literal["bfloat16", "float32", "auto"]
SAVE_DTYPES: tuple[SaveDtype, ...] = get_args(SaveDtype)
OnNonFinite: TypeAlias = Literal["fail", "skip"]
ON_NONFINITE: tuple[OnNonFinite, ...] = get_args(OnNonFinite)
Overlong: TypeAlias = Literal["truncate", "skip", "fail"]
OVERLONG: tuple[Overlong, ...] = get_args(Overlong)

_TAKEN = {
    "model": "model",
    "layer_ids": "layer_ids",
    "tensor_parallel_size": "tensor_parallel_size",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "dtype": "dtype",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "trust_remote_code": "trust_remote_code",
    "enable_prefix_caching": "share_prefixes",
    "max_num_seqs": "batch_size",
    "max_model_len": "max_seq_len",
}
"""Engine option -> the field that sets it."""


@dataclass(frozen=True, slots=True)
class ExtractConfig:
    """What one extraction is asked to do; checked when made.

    Attributes:
        model: a folder or a name that vLLM accepts.
        prepared_data: the file of samples, or the folder of a dataset; see ``inputs``.
        output_dir: where the samples, the journals and ``run.json`` go; made when missing. A run that is there goes on.
            Only ``stream`` does without.
        layer_ids: what to capture; None for ``[2, n // 2, n - 3, n - 1]`` of a model with n decoder layers.
        batch_size: the most samples that are under way at once. No barrier: the next starts when one ends.
        max_seq_len: tokens that are kept of a sample, from its start.
        tensor_parallel_size: GPUs to split each layer over.
        gpu_memory_utilization: share of a GPU's memory, in (0, 1]; None for vLLM's own default.
        dtype: the model's dtype in the engine.
        save_dtype: the dtype of the states on disk; ``"auto"`` is the dtype they were captured in.
        max_num_batched_tokens: the most tokens of one step; None for vLLM's own default.
        trust_remote_code: let the model's repository bring its own code.
        share_prefixes: forward the tokens that samples begin with alike once (vLLM's prefix caching), and give each its
            states.
        num_samples: extract the first so many samples at most; None for all.
        format: how samples lie on disk; a name of ``vllm_compat.formats.FORMATS``.
        overlong: what becomes of a sample of more tokens: it is cut, left out and named, or the input refused.
        on_nonfinite: what a NaN or an infinity in a sample's states does: end the run, or leave the sample out.
        shard: ``(i, n)``: this process extracts the samples whose index modulo n is i.
        generate: tokens that the model answers at most, beside the prompt that a sample then is; 0 for none. A loss
            mask of the input is not used.
        sampling: fields of vLLM's ``SamplingParams`` for the answers; greedy when left out. A ``seed`` is that of the
            first sample, and each has its own.
        rehearsal: run the model's first layers with made-up weights before it is loaded; see ``rehearsal``.
        writers: threads that write.
        max_pending_bytes: of states that may wait for them; the engine waits beyond.
        engine_options: more arguments of ``open_engine``.

    Raises:
        UsageError: a value that cannot mean anything, or an engine option that has a field of its own.
    """

    model: str
    prepared_data: str | os.PathLike[str]
    output_dir: str | os.PathLike[str] = ""
    layer_ids: tuple[LayerId, ...] | None = None
    batch_size: int = 8
    max_seq_len: int = 2048
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float | None = None
    dtype: str = "auto"
    save_dtype: SaveDtype = "bfloat16"
    max_num_batched_tokens: int | None = None
    trust_remote_code: bool = False
    share_prefixes: bool = False
    num_samples: int | None = None
    format: str = "safetensors"
    overlong: Overlong = "truncate"
    on_nonfinite: OnNonFinite = "fail"
    shard: tuple[int, int] = (0, 1)
    generate: int = 0
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    rehearsal: bool = True
    writers: int = 2
    max_pending_bytes: int = 2 << 30
    engine_options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        for name in (
            *("batch_size", "max_seq_len", "tensor_parallel_size", "max_num_batched_tokens", "num_samples"),
            *("writers", "max_pending_bytes"),
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, found {value}")
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization <= 1:
            raise UsageError(
                f"gpu_memory_utilization must be above 0 and at most 1, found {self.gpu_memory_utilization}"
            )
        if self.save_dtype not in SAVE_DTYPES:
            raise UsageError(f"save_dtype must be one of {', '.join(SAVE_DTYPES)}, found {self.save_dtype!r}")
        if self.overlong not in OVERLONG:
            raise UsageError(f"overlong must be one of {', '.join(OVERLONG)}, found {self.overlong!r}")
        if self.on_nonfinite not in ON_NONFINITE:
            raise UsageError(f"on_nonfinite must be one of {', '.join(ON_NONFINITE)}, found {self.on_nonfinite!r}")
        if not 0 <= self.shard[0] < self.shard[1]:
            raise UsageError(f"shard must be (i, n) with 0 <= i < n, found {self.shard}")
        if self.layer_ids is not None and not self.layer_ids:
            raise UsageError("layer_ids is empty: nothing would be captured. Leave it out for the default ids")
        if self.generate < 0:
            raise UsageError(f"generate must be at least 0, found {self.generate}")
        if self.sampling and not self.generate:
            raise UsageError("sampling is for answers, and none are asked for. Give generate, too")
        if taken := {"max_tokens", "n", "logprobs", "prompt_logprobs"} & self.sampling.keys():
            raise UsageError(f"sampling may not set {', '.join(sorted(taken))} here; generate says how many tokens")
        if type(self.sampling.get("seed", 0)) is not int:
            raise UsageError(f"the seed of sampling must be an integer, found {self.sampling['seed']!r}")
        for name in self.engine_options:
            if name in _TAKEN:
                raise UsageError(f"engine option {name!r} is set by {_TAKEN[name]} here; use that")

    def open_engine_options(self, max_model_len: int) -> dict[str, Any]:
        """Keyword arguments of ``open_engine`` but the layer ids; what was left to vLLM is left out."""
        chosen = {
            "tensor_parallel_size": self.tensor_parallel_size,
            "max_model_len": max_model_len,
            "max_num_seqs": self.batch_size,
            "dtype": self.dtype,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "trust_remote_code": self.trust_remote_code or None,
            "enable_prefix_caching": self.share_prefixes or None,
        }
        return {name: value for name, value in chosen.items() if value is not None} | dict(self.engine_options)
