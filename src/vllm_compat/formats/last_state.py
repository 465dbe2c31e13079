"""What a format wants of the layer ids: auxiliary layers, then the model's last state, before or after the norm."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_compat.errors import UsageError
from vllm_compat.formats.once import warn_once
from vllm_compat.types import NORM, LayerId

__all__ = ["check_eagle_ids"]


def check_eagle_ids(
    name: str,
    layer_ids: Sequence[LayerId],
    num_layers: int | None,
    *,
    pre_norm: bool,
    post_norm: bool,
    num_aux: int | None = None,
) -> None:
    """Refuse ids that are not auxiliary layers and then the last state; warn where their order is not the served one.

    Args:
        name: the format's, for messages.
        layer_ids: what is to be captured, in order; at least one.
        num_layers: decoder layers of the model; None when not known, and then any layer passes for the last one.
        pre_norm: the last state may be the one that leaves the last layer.
        post_norm: it may be the one after the final norm.
        num_aux: how many auxiliary layers there must be; None for any number from 1.

    Raises:
        UsageError: with ids that do.
    """
    top = None if num_layers is None else num_layers - 1
    *before, last = layer_ids
    aux = [k for k in before if isinstance(k, int) and k != top]
    ends_well = post_norm if last == NORM else pre_norm and top in (None, last)
    if not ends_well or len(aux) < len(before):
        ends = []
        if pre_norm:
            ends.append(f"{'n - 1' if top is None else top} (the state that leaves the last layer, before the norm)")
        if post_norm:
            ends.append(f"`{NORM}` (the state after the final norm)")
        end = last if ends_well else (NORM if not pre_norm else "n - 1" if top is None else top)
        use = [*aux, *([last] if not ends_well and last not in (NORM, top) else []), end]
        raise UsageError(
            f"format {name} wants auxiliary layers and, as the last id only, {' or '.join(ends)}; found "
            f"{_text(layer_ids)}. Use --layer-ids {_text(use)}"
        )
    if len(aux) != num_aux if num_aux is not None else not aux:
        wanted = "at least one auxiliary layer" if num_aux is None else f"{num_aux} auxiliary layers"
        raise UsageError(f"format {name} wants {wanted} before the last state, found {_text(layer_ids)}")
    if aux != sorted(aux):
        warn_once(
            f"the auxiliary layers {_text(aux)} are not in ascending order, in which vLLM hands them to the draft "
            "model when it serves: a head trained on them as they are gets its inputs in another order then, without "
            "an error"
        )


def _text(layer_ids: Sequence[object]) -> str:
    return " ".join(map(str, layer_ids))
