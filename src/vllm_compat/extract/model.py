"""What a model's ``config.json`` says, when it lies on this machine; nothing is downloaded and nothing imported."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

from vllm_compat._layers import check_layer_ids
from vllm_compat.errors import UsageError
from vllm_compat.extract.revision import local_folder
from vllm_compat.types import LayerId

__all__ = ["NAMES", "ModelFacts", "choose_layer_ids", "read_model_facts"]

NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
        "hidden_size": ("hidden_size", "n_embd", "d_model", "n_embed"),
        "vocab_size": ("vocab_size", "padded_vocab_size"),
        "max_positions": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx"),
    }
)
"""What ``config.json`` calls each fact, the usual name first.

The others are those of GPT-2 and its kin, Bloom, Falcon's first ones, MPT, DBRX and ChatGLM, as the classes of
transformers (``attribute_map``) or the models' own read them.
"""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known of a model before it is loaded; None where the file does not say.

    Attributes:
        num_layers: decoder layers.
        hidden_size: width of a state.
        vocab_size: token ids lie below it.
        max_positions: tokens that fit, prompt and sampled ones together.
        why_unknown: why there is nothing, where there is no readable ``config.json``.
    """

    num_layers: int | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    max_positions: int | None = None
    why_unknown: str = ""


def read_model_facts(model: str, options: Mapping[str, Any] = MappingProxyType({})) -> ModelFacts:
    """The facts in the model's ``config.json``, those of its ``text_config`` first.

    Args:
        model: a folder, or a name on the hub, which is looked for in the local cache.
        options: of the engine; ``revision`` counts.
    """
    folder = local_folder(model, options)
    if folder is None:
        return ModelFacts(why_unknown=f"{model} is no local folder, nor in the hub's cache")
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return ModelFacts(why_unknown=f"{folder / 'config.json'} cannot be read: {error}")
    if not isinstance(found, dict):
        return ModelFacts(why_unknown=f"{folder / 'config.json'} is not a JSON object")
    config = cast("dict[str, Any]", found)
    text = config.get("text_config")
    places = [cast("dict[str, Any]", text), config] if isinstance(text, dict) else [config]
    return ModelFacts(
        num_layers=_number(places, "num_layers"),
        hidden_size=_number(places, "hidden_size"),
        vocab_size=_number(places, "vocab_size"),
        max_positions=_number(places, "max_positions"),
    )


def choose_layer_ids(asked: tuple[LayerId, ...] | None, facts: ModelFacts) -> tuple[LayerId, ...]:
    """The ids asked for, or the default ``[2, n // 2, n - 3, n - 1]``; checked as far as the model is known.

    Raises:
        UsageError: an id that is out of range or there twice, or no ids for a model that the default does not suit.
    """
    n = facts.num_layers
    if asked is not None:
        if not asked:
            raise UsageError("the engine captures no layers; open it with layer_ids")
        if any(isinstance(i, int) and i < 0 for i in asked):
            raise UsageError(f"layer ids count from 0, found {asked}")
        most = max((i for i in asked if isinstance(i, int)), default=0)
        return check_layer_ids(asked, most + 1 if n is None else n)
    if n is None:
        why = facts.why_unknown or "config.json has no num_hidden_layers"
        raise UsageError(f"the default layer ids need the model's number of layers, and {why}. Give --layer-ids")
    default: tuple[LayerId, ...] = (2, n // 2, n - 3, n - 1)
    if len(set(default)) < len(default) or n < len(default):
        raise UsageError(f"the default layer ids 2, n//2, n-3, n-1 do not suit a model of {n} layers. Give --layer-ids")
    return default


def _number(places: Sequence[Mapping[str, Any]], fact: str) -> int | None:
    """The first number under any name of a fact, in the first place that has one."""
    values = (place.get(name) for place in places for name in NAMES[fact])
    return next((value for value in values if type(value) is int and value > 1), None)
