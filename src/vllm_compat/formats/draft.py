"""What a draft model's configuration must say of the layers it was trained on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from vllm_compat.extract.files import write_whole
from vllm_compat.types import LayerId

__all__ = ["DRAFT_CONFIG", "draft_config", "write_draft_config"]

DRAFT_CONFIG = "draft_config.json"


def draft_config(layer_ids: Sequence[LayerId], num_layers: int) -> dict[str, list[int]]:
    """The snippet for the draft model's ``config.json``, in vLLM's own convention: one higher than ours.

    The state that leaves the last layer, and the one after the final norm, are the verifier's last state and no
    auxiliary ones. Serving without this key uses vLLM's default ids, which costs acceptance in silence.

    Returns:
        ``{"eagle_aux_hidden_state_layer_ids": [3, 31, 59]}`` for ``2 30 58`` and the last state; empty without
        auxiliary layers.
    """
    ids = [k + 1 for k in layer_ids if isinstance(k, int) and k != num_layers - 1]
    return {"eagle_aux_hidden_state_layer_ids": ids} if ids else {}


def write_draft_config(folder: Path, layer_ids: Sequence[LayerId], num_layers: int | None) -> tuple[str, ...]:
    """Write ``draft_config.json``; nothing where there are no auxiliary layers, or the model's depth is not known.

    Returns:
        The names of what was written.

    Raises:
        VllmCompatError: it cannot be written.
    """
    found = draft_config(layer_ids, num_layers) if num_layers is not None else {}
    if not found:
        return ()
    write_whole(folder / DRAFT_CONFIG, [(json.dumps(found) + "\n").encode()])
    return (DRAFT_CONFIG,)
