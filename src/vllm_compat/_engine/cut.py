"""A model's first layers, built by vLLM from the model's own configuration, with weights that are made up."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_compat._engine.kinds import FirstLayers, first_layers
from vllm_compat.detection import detect
from vllm_compat.errors import UsageError
from vllm_compat.types import LayerId

__all__ = ["CutModel", "UncutError", "cut_model"]

_NO_DUMMY = frozenset({"bitsandbytes", "gguf"})  # their loaders make the parameters, and so dummy weights have none


class UncutError(Exception):
    """The model cannot be cut; the message says why."""


@dataclass(frozen=True, slots=True)
class CutModel:
    """How to open the first layers of a model.

    Attributes:
        first: which layers they are.
        options: for ``open_engine``; the layer ids are in ``first``.
        budget: the most tokens of one step.
        special: token ids that the configuration gives a meaning.
    """

    first: FirstLayers
    options: Mapping[str, Any] = field(repr=False)
    budget: int
    special: frozenset[int]


def cut_model(model: str, options: Mapping[str, Any], layer_ids: Sequence[LayerId]) -> CutModel:
    """Ask vLLM for the model's configuration and shorten it.

    Args:
        model: as for ``open_engine``.
        options: as for ``open_engine``.
        layer_ids: what is to be captured of the whole model.

    Raises:
        UncutError: nothing that is shorter can be built.
        UsageError: vLLM refuses the model or the options.
        UnsupportedVllmError: no behaviour fits the installed vLLM.
    """
    detect().require_adapter()
    from vllm.engine.arg_utils import EngineArgs

    known = {f.name for f in dataclasses.fields(EngineArgs)}
    # open_engine, which comes next, names options that are unknown; and it too runs eager.
    taken = {"enforce_eager": True} | {name: value for name, value in options.items() if name in known}
    try:
        config = EngineArgs(model=model, **taken).create_engine_config()
    except (OSError, TypeError, ValueError) as error:
        raise UsageError(f"vLLM refuses the model {model!r} or these options, {taken}: {error}") from error
    whole, text = config.model_config.hf_config, config.model_config.hf_text_config
    of = getattr(text, "num_hidden_layers", None)
    if type(of) is not int or of < 1:
        raise UncutError(f"the configuration {type(text).__name__} has no num_hidden_layers")
    if (method := config.model_config.quantization) in _NO_DUMMY:
        raise UncutError(f"weights of {method} cannot be made up")
    path = _path(whole, text)
    if path is None:
        raise UncutError(f"{type(whole).__name__} does not hold the configuration of its language model")
    first = first_layers(vars(text), of, layer_ids)
    own = dict(options.get("hf_overrides") or {})
    cut = {name: value for name, value in options.items() if name != "model_loader_extra_config"}
    cut |= {"load_format": "dummy", "hf_overrides": own | _overrides(whole, path, first.changes)}
    special = frozenset(_special(whole.to_dict()))
    return CutModel(first, cut, config.scheduler_config.max_num_batched_tokens, special)


def _path(config: Any, text: Any) -> list[str] | None:
    """The attributes that lead from a configuration to that of its language model, which may be itself."""
    if config is text:
        return []
    for name, value in vars(config).items():
        if hasattr(value, "get_text_config") and (rest := _path(value, text)) is not None:
            return [name, *rest]
    return None


def _overrides(config: Any, path: Sequence[str], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``hf_overrides`` that make the changes.

    A nested configuration is given whole, as the object it is: not every release merges dictionaries into one.
    """
    if not path or not changes:
        return dict(changes)
    own = copy.deepcopy(getattr(config, path[0]))
    inner = own
    for name in path[1:]:
        inner = getattr(inner, name)
    for name, value in changes.items():
        setattr(inner, name, value)
    return {path[0]: own}


def _special(config: Mapping[Any, Any]) -> Iterator[int]:
    """Every token id in a configuration, those of its parts too: some stand for a picture that is not there."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _special(value)
        elif isinstance(name, str) and "token" in name:
            yield from (i for i in (value if isinstance(value, list) else [value]) if type(i) is int)
