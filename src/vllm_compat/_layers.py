"""Layer ids as asked for, checked against a model's number of layers."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_compat.errors import UsageError
from vllm_compat.types import NORM, LayerId

__all__ = ["check_layer_ids", "parse_layer_id"]


def parse_layer_id(text: str) -> LayerId:
    """``"30"`` or ``"norm"`` from a command line.

    Raises:
        ValueError: anything else.
    """
    if text == NORM:
        return NORM
    if not text.isdecimal():
        raise ValueError(f"a layer id is a number from 0, or `{NORM}`; found {text!r}")
    return int(text)


def check_layer_ids(layer_ids: Sequence[LayerId], num_layers: int) -> tuple[LayerId, ...]:
    """The same ids, in the same order.

    Raises:
        UsageError: an id that is out of range, of a wrong type or there twice.
    """
    for layer_id in layer_ids:
        if layer_id == NORM:
            continue
        if type(layer_id) is not int:
            raise UsageError(f"layer id {layer_id!r} is neither an integer nor {NORM!r}")
        if not 0 <= layer_id < num_layers:
            raise UsageError(
                f"layer id {layer_id} is out of range: the model has {num_layers} decoder layers, 0 to "
                f"{num_layers - 1}. An id names the state leaving that layer; vLLM's own auxiliary ids are one higher "
                f"(its {num_layers} is {num_layers - 1} here), and {NORM!r} is the state after the final norm."
            )
    twice = sorted({str(i) for i in layer_ids if layer_ids.count(i) > 1})
    if twice:
        raise UsageError(f"layer id(s) {', '.join(twice)} asked for more than once")
    return tuple(layer_ids)
