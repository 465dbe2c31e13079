"""What the matrix knows a release's CPU build to get wrong, for one model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from vllm_compat.detection import Detection
from vllm_compat.doctor.config import ModelConfig
from vllm_compat.doctor.platforms import built_for
from vllm_compat.doctor.statement import Statement

__all__ = ["judge_faults"]


def _of(family: str, config: ModelConfig) -> bool:
    return family in " ".join((*config.architectures, *config.inner, str(config.text.get("model_type", "")))).lower()


def _has_experts(config: ModelConfig) -> bool:
    return any(config.text.get(name) for name in ("n_routed_experts", "num_experts", "num_local_experts"))


def _has_yarn(config: ModelConfig) -> bool:
    return any("yarn" in str(config.text.get(name, "")) for name in ("rope_scaling", "rope_parameters"))


# Fault -> the models that it concerns. One that is not here may concern any.
_CONCERNED: Mapping[str, Callable[[ModelConfig], bool]] = {
    "amx": lambda _: False,  # open_engine sees to it
    "mla": lambda c: "kv_lora_rank" in c.text,
    "mla-amx": lambda c: "kv_lora_rank" in c.text,
    "mla-sizes": lambda c: "kv_lora_rank" in c.text and _mla_sizes(c) != (512, 64),
    "rms-norm": lambda c: _of("qwen3", c),
    "expert-groups": lambda c: (c.text.get("n_group") or 1) > 1,
    "deepseek-rotary": lambda c: _of("deepseek", c) and not _has_yarn(c),
    "deepseek-build": lambda c: _of("deepseek", c),
    "experts": _has_experts,
    "experts-amx": _has_experts,
    "kimi-gpu": lambda c: _of("kimi", c),
    "kimi-start": lambda c: _of("kimi", c),
}


def _mla_sizes(config: ModelConfig) -> tuple[object, object]:
    return config.text.get("kv_lora_rank"), config.text.get("qk_rope_head_dim")


def judge_faults(found: Detection, config: ModelConfig) -> Iterator[Statement]:
    """The faults that concern a model; none on a build for GPUs, or of a release that is not in the matrix."""
    release = found.release if built_for(found) == "cpu" else None
    if release:
        for name, words in release.faults.items():
            concerned = _CONCERNED.get(name)
            if concerned is None or concerned(config):
                yield Statement(f"fault_{name}", words, words, f"matrix/vllm.toml: {release.vllm}")
