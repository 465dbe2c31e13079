"""``modelopt``: the files of NVIDIA ModelOpt's offline training."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import PurePosixPath
from typing import Any, ClassVar

from vllm_compat.formats.archive import ArchiveFormat
from vllm_compat.formats.base import SampleData
from vllm_compat.formats.last_state import check_eagle_ids
from vllm_compat.formats.once import warn_once
from vllm_compat.types import NORM, LayerId, Tensor

__all__ = ["ModelOpt"]

_NAME = re.compile(r"(?!sample_\d+\Z)[A-Za-z0-9](?:[A-Za-z0-9._-]{0,126}[A-Za-z0-9])?", re.ASCII)
"""Ids that may name a file; those that look like the name of a sample without one may not."""


class ModelOpt(ArchiveFormat):
    """``hidden_states`` [tokens, hidden_size], the last; ``aux_hidden_states`` [tokens, n * hidden_size], the others.

    ``hidden_states_prenorm`` says whether the last state is the one before the final norm. A sample's file is named
    after its id where that is 1 to 128 of ``A-Z a-z 0-9 . _ -`` and begins and ends with a letter or digit, otherwise
    after its index.
    """

    name: ClassVar[str] = "modelopt"
    description: ClassVar[str] = "{id}.pt: hidden_states, aux_hidden_states, input_ids, loss_mask, conversation_id"
    readers: ClassVar[str] = "ModelOpt (last state `norm`; n - 1 where it knows hidden_states_prenorm)"

    def check(self, layer_ids: tuple[LayerId, ...], num_layers: int | None) -> None:
        super().check(layer_ids, num_layers)
        check_eagle_ids(self.name, layer_ids, num_layers, pre_norm=True, post_norm=True)
        if layer_ids[-1] != NORM:
            warn_once(
                f"format {self.name} with the last state before the final norm: a ModelOpt that does not know the key "
                f"hidden_states_prenorm takes it for normed, without an error; for it, make `{NORM}` the last id"
            )

    def file(self, index: int, sample_id: str | None) -> PurePosixPath:
        named = sample_id is not None and _NAME.fullmatch(sample_id)
        return PurePosixPath(f"{sample_id}.pt" if named else f"sample_{index}.pt")

    def pack(self, sample: SampleData, states: Tensor) -> dict[str, Any]:
        torch: Any = import_module("torch")
        *aux, last = states.unbind(1)
        return {
            "hidden_states": last.clone(),
            "aux_hidden_states": torch.cat(aux, -1),
            "hidden_states_prenorm": sample.layer_ids[-1] != NORM,
            "conversation_id": str(sample.index) if sample.id is None else sample.id,
        }

    def unpack(self, fields: dict[str, Any], num_layers: int) -> Tensor:
        torch: Any = import_module("torch")
        aux = fields["aux_hidden_states"].unflatten(-1, (num_layers - 1, -1))
        return torch.cat([aux, fields["hidden_states"][:, None]], 1)
