"""Which of a model's first layers show every kind of layer it has, judged by its configuration.

The layers of a model are alike, but for a few that its configuration tells apart in one of four ways: a list with an
entry for each layer, a list of the layers that are different, a number from which on they are, or a period. The first
layers of a model, left as they are, need no other configuration than a smaller number of layers and shorter lists:
indices, periods and the names in quantisation lists stay true.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from vllm_compat.types import NORM, LayerId

__all__ = ["MOST_LAYERS", "FirstLayers", "first_layers"]

MOST_LAYERS = 16
"""No more are rehearsed, whatever the kinds."""
_MOST_KINDS = 8  # a list with more values than this has sizes, not kinds
_SEQUENCES = (list, tuple)

_BEGINS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "moe_start_layer", "num_hash_layers")
"""Keys of the first layer of another kind."""
_PERIODS = (
    "attn_layer_period",
    "cross_attention_frequency",
    "decoder_sparse_step",
    "expert_layer_period",
    "full_attention_interval",
    "global_attn_every_n_layers",
    "interleave_moe_layer_step",
    "layer_group_size",
    "moe_layer_freq",
    "moe_layer_interval",
    "no_rope_layer_interval",
    "sliding_window_pattern",
)
"""Keys of a number of layers after which the kinds repeat."""
_INDICES = (
    "attn_layer_indices",
    "cross_attention_layers",
    "full_attn_idxs",
    "full_attn_layers",
    "global_attn_idx",
    "global_attn_layers",
    "hybrid_layer_ids",
    "kda_layers",
    "mlp_only_layers",
    "moe_layers",
    "moe_layers_enum",
)
"""Keys of the numbers of layers of another kind."""
_SHARED = "num_kv_shared_layers"
_NEVER = ("architectures", "token_id", "token_ids")
"""Ends of keys whose lists never go by layers, whatever their length."""


@dataclass(frozen=True, slots=True)
class FirstLayers:
    """The first layers of a model.

    Attributes:
        num_layers: how many.
        of: how many the model has.
        changes: fields of its configuration that must change with the number, with their new values.
        layer_ids: what is captured of them, each in the place of one that was asked for; the last layer in that of the
            last.
        unseen: what is different further on, for people.
    """

    num_layers: int
    of: int
    changes: Mapping[str, Any] = field(repr=False)
    layer_ids: tuple[LayerId, ...]
    unseen: tuple[str, ...]


def first_layers(fields: Mapping[str, Any], of: int, layer_ids: Sequence[LayerId]) -> FirstLayers:
    """The fewest first layers that show every kind, and have a place for every layer id.

    Args:
        fields: the configuration of the language model.
        of: its number of layers.
        layer_ids: what is to be captured of the whole model.
    """
    asked = sorted(i for i in layer_ids if isinstance(i, int))
    spare = int(bool(asked) and asked[-1] != of - 1)  # the last layer takes the place of the last, and of no other
    wanted = dict(_wanted(fields, of))
    shared = int(bool(fields.get(_SHARED)))
    least = max([len(asked[-MOST_LAYERS:]), *(n for n in wanted.values() if n <= MOST_LAYERS)])
    count = max(2, least + spare) + shared
    if count >= of:
        return FirstLayers(of, of, {}, tuple(layer_ids), ())
    changes = {"num_hidden_layers": count} | {name: value[:count] for name, value in _lists(fields, of)}
    if shared:
        changes[_SHARED] = 1
    kept = asked[-(count - spare) :]
    places: dict[LayerId, LayerId] = {i: count - spare - len(kept) + rank for rank, i in enumerate(kept)}
    places[NORM] = NORM
    return FirstLayers(
        num_layers=count,
        of=of,
        changes=changes,
        layer_ids=tuple(places[i] for i in layer_ids if i in places),
        unseen=tuple(f"{name}, from layer {n - 1} on" for name, n in sorted(wanted.items()) if n > count),
    )


def _wanted(fields: Mapping[str, Any], of: int) -> Iterator[tuple[str, int]]:
    """How many first layers each field wants to show its kinds."""
    for name, value in _lists(fields, of):
        values = list(map(repr, value))
        if 1 < len(set(values)) <= _MOST_KINDS:
            yield name, max(map(values.index, set(values))) + 1
    begin = max((v for v in _numbers(fields, _BEGINS) if v < of), default=0)
    period = max((v for v in _numbers(fields, _PERIODS) if v < of), default=1)
    if begin + period > 1:
        yield "the layers that its numbers tell apart", begin + period
    for name, value in _with_nested(fields):
        if name.lstrip("_") in _INDICES and (found := set(_indices(value))):
            yield name, max(min(found), min(set(range(of)) - found, default=0)) + 1


def _lists(fields: Mapping[str, Any], of: int) -> Iterator[tuple[str, Any]]:
    """Fields with an entry for each layer: lists, or text with a letter for each."""
    for name, value in fields.items():
        listed = isinstance(value, _SEQUENCES) or (isinstance(value, str) and name.endswith("pattern"))
        if listed and len(value) == of and not name.endswith(_NEVER):
            yield name, value


def _numbers(fields: Mapping[str, Any], names: Sequence[str]) -> Iterator[int]:
    for name, value in fields.items():
        if name.lstrip("_") in names and type(value) is int:
            yield value


def _with_nested(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        yield name, value
        if isinstance(value, dict):
            yield from ((key, inner) for key, inner in value.items() if isinstance(key, str))


def _indices(value: Any) -> Iterator[int]:
    parts = value.split(",") if isinstance(value, str) else value
    for part in cast("list[Any]", parts if isinstance(parts, _SEQUENCES) else []):
        if type(part) is int or (isinstance(part, str) and part.strip().isdecimal()):
            yield int(part)
