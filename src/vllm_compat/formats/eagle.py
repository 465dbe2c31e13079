"""``eagle``: the files of EAGLE's own training of EAGLE-1 and 2; its EAGLE-3 training reads none."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any, ClassVar

from vllm_compat.errors import UsageError
from vllm_compat.formats.archive import ArchiveFormat
from vllm_compat.formats.base import SampleData
from vllm_compat.types import NORM, LayerId, Tensor

__all__ = ["Eagle"]


class Eagle(ArchiveFormat):
    """``hidden_state`` [tokens, hidden_size], after the final norm.

    The reader takes every file of the tree for a sample, so they have a folder for themselves: give it ``DIR/0``.
    """

    name: ClassVar[str] = "eagle"
    description: ClassVar[str] = "0/data_{i}.ckpt: hidden_state, input_ids, loss_mask"
    readers: ClassVar[str] = "EAGLE-1 and 2 (the state `norm` alone), with --tmpdir DIR/0"

    def check(self, layer_ids: tuple[LayerId, ...], num_layers: int | None) -> None:
        super().check(layer_ids, num_layers)
        if layer_ids != (NORM,):
            found = " ".join(map(str, layer_ids))
            raise UsageError(
                f"format {self.name} has the state after the final norm and no other, found {found}. "
                f"Use --layer-ids {NORM}"
            )

    def file(self, index: int, sample_id: str | None) -> PurePosixPath:
        return PurePosixPath(f"0/data_{index}.ckpt")

    def pack(self, sample: SampleData, states: Tensor) -> dict[str, Any]:
        return {"hidden_state": states[:, 0].clone()}

    def unpack(self, fields: dict[str, Any], num_layers: int) -> Tensor:
        return fields["hidden_state"][:, None]
