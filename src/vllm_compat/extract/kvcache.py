"""What a token takes of the KV cache on each GPU, by the model's ``config.json`` and the options of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, cast

from vllm_compat.extract.config import ExtractConfig
from vllm_compat.extract.revision import local_folder

__all__ = ["engine_element_bytes", "kv_bytes_per_token"]

_DTYPES = {"auto": 2, "half": 2, "float16": 2, "bfloat16": 2, "float": 4, "float32": 4}
"""vLLM's ``auto`` makes 16 bits of float32, too."""
_FP8 = {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
_ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})
_MIXED = (
    "attn_layer_period",
    "attn_type_list",
    "full_attention_interval",
    "hybrid_override_pattern",
    "linear_attn_config",
)
"""Keys of models that have layers without a KV cache, and do not say which in ``layer_types``."""


def engine_element_bytes(config: ExtractConfig) -> int | None:
    """Bytes of a number of the model's dtype; None for a dtype that is not known here."""
    return _DTYPES.get(config.dtype)


def kv_bytes_per_token(config: ExtractConfig) -> tuple[int | None, str]:
    """The bytes, and what they are made of; or None, and why they are not known."""
    fields = _text_config(config)
    if fields is None:
        return None, f"{config.model} has no config.json on this machine"
    layers = fields.get("num_hidden_layers")
    if type(layers) is not int:
        return None, "config.json has no num_hidden_layers"
    layers, note = _layers_with_cache(fields, layers)
    if layers is None:
        return None, note
    dtype = str(config.engine_options.get("kv_cache_dtype", "auto"))
    element = (
        engine_element_bytes(config) if dtype == "auto" else 1 if dtype.startswith("fp8_e") else _DTYPES.get(dtype)
    )
    element = 1 if dtype == "fp8" else element
    if element is None:
        return None, f"the size of kv_cache_dtype {dtype!r} with dtype {config.dtype!r} is not known here"
    width, made_of = _width(fields, config.tensor_parallel_size)
    if width is None:
        return None, made_of
    return layers * width * element, f"{layers} layers x {made_of} x {element} bytes{note}"


def _width(fields: Mapping[str, Any], ranks: int) -> tuple[int | None, str]:
    """Numbers of one token in one layer on one GPU."""
    rank, rope = fields.get("kv_lora_rank"), fields.get("qk_rope_head_dim")
    if type(rank) is int and type(rope) is int:
        if os.environ.get("VLLM_MLA_DISABLE", "0") not in ("", "0"):
            return None, "MLA is switched off by VLLM_MLA_DISABLE"
        return rank + rope, f"({rank} + {rope}), MLA, the same on every GPU"
    queries = fields.get("num_attention_heads")
    heads = fields.get("num_key_value_heads", queries)
    size = fields.get("head_dim")
    if size is None and type(queries) is int and type(fields.get("hidden_size")) is int:
        size = fields["hidden_size"] // queries
    if type(heads) is not int or type(size) is not int:
        return None, "config.json does not say how many KV heads there are, and of what size"
    own = max(1, heads // ranks)
    return 2 * own * size, f"2 x {own} of {heads} heads x {size}"


def _layers_with_cache(fields: Mapping[str, Any], layers: int) -> tuple[int | None, str]:
    kinds = fields.get("layer_types")
    if not isinstance(kinds, list):
        mixed = next((name for name in _MIXED if fields.get(name)), None)
        return (None, f"its layers are of several kinds ({mixed})") if mixed else (layers, "")
    cached = [kind for kind in kinds if kind in _ATTENTION]
    other = sorted({str(kind) for kind in kinds} - _ATTENTION)
    if other:
        return len(cached), f"; the state of layers that are {', '.join(other)} comes to that"
    return len(cached), "" if set(cached) <= {"full_attention", "attention"} else "; at most, as windows need less"


def _text_config(config: ExtractConfig) -> Mapping[str, Any] | None:
    folder = local_folder(config.model, config.engine_options)
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8")) if folder else None
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict):
        return None
    whole = cast("dict[str, Any]", found)
    inner = whole.get("text_config")
    return whole | cast("dict[str, Any]", inner) if isinstance(inner, dict) else whole
