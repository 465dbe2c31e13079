"""``specforge``: the files of SpecForge's offline training of EAGLE-3."""

from __future__ import annotations

from importlib import import_module
from pathlib import PurePosixPath
from typing import Any, ClassVar

from vllm_compat.formats.archive import ArchiveFormat
from vllm_compat.formats.base import SampleData
from vllm_compat.formats.last_state import check_eagle_ids
from vllm_compat.types import LayerId, Tensor

__all__ = ["SpecForge"]

_ROWS_PER_FOLDER = 2000


class SpecForge(ArchiveFormat):
    """``hidden_state`` [1, tokens, hidden_size], after the final norm; ``aux_hidden_state`` [1, tokens, 3 hidden_size].

    A folder has 2000 samples, as SpecForge's own script has it.
    """

    name: ClassVar[str] = "specforge"
    description: ClassVar[str] = "rows_{a}-{b}/data_{i}.ckpt: hidden_state, aux_hidden_state, input_ids, loss_mask"
    readers: ClassVar[str] = "SpecForge's offline EAGLE-3 (last state `norm`)"

    def check(self, layer_ids: tuple[LayerId, ...], num_layers: int | None) -> None:
        super().check(layer_ids, num_layers)
        check_eagle_ids(self.name, layer_ids, num_layers, pre_norm=False, post_norm=True, num_aux=3)

    def file(self, index: int, sample_id: str | None) -> PurePosixPath:
        first = index - index % _ROWS_PER_FOLDER
        return PurePosixPath(f"rows_{first}-{first + _ROWS_PER_FOLDER}/data_{index}.ckpt")

    def pack(self, sample: SampleData, states: Tensor) -> dict[str, Any]:
        torch: Any = import_module("torch")
        *aux, last = states.unbind(1)
        return {"hidden_state": last[None].clone(), "aux_hidden_state": torch.cat(aux, -1)[None]}

    def unpack(self, fields: dict[str, Any], num_layers: int) -> Tensor:
        torch: Any = import_module("torch")
        aux = fields["aux_hidden_state"][0].unflatten(-1, (num_layers - 1, -1))
        return torch.cat([aux, fields["hidden_state"][0][:, None]], 1)
