"""``speculators-v1``: the files of speculators' own generator until 0.4, and of its trainer until 0.7."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from vllm_compat.extract.files import write_whole
from vllm_compat.formats.archive import ArchiveFormat
from vllm_compat.formats.base import SampleData, SealedRun
from vllm_compat.formats.last_state import check_eagle_ids
from vllm_compat.formats.once import warn_once
from vllm_compat.types import NORM, LayerId, Tensor

__all__ = ["SpeculatorsV1"]

_LENGTHS = "sample_lengths.json"


class SpeculatorsV1(ArchiveFormat):
    """``data_{i}.pt``: ``hidden_states`` is a list of a tensor [tokens, hidden_size] for each layer.

    The reader takes every file of the tree whose name ends in ``pt`` for a sample, so nothing else may end so: there is
    no ``token_freq.pt``.
    """

    name: ClassVar[str] = "speculators-v1"
    description: ClassVar[str] = "data_{i}.pt and sample_lengths.json"
    readers: ClassVar[str] = "speculators 0.3.0 (last state `norm`), 0.4.0 to 0.7 (last state n - 1)"

    def check(self, layer_ids: tuple[LayerId, ...], num_layers: int | None) -> None:
        super().check(layer_ids, num_layers)
        check_eagle_ids(self.name, layer_ids, num_layers, pre_norm=True, post_norm=True, num_aux=3)
        if layer_ids[-1] == NORM:
            warn_once(
                f"format {self.name} with the last state after the final norm: right for the trainer of speculators "
                "0.3.0 only. Later ones apply the norm once more, without an error"
            )
        else:
            warn_once(
                f"format {self.name} with the last state before the final norm: right for the trainers of speculators "
                f"0.4.0 to 0.7. That of 0.3.0 takes it for normed, without an error; for it, make `{NORM}` the last id"
            )

    def file(self, index: int, sample_id: str | None) -> PurePosixPath:
        return PurePosixPath(f"data_{index}.pt")

    def pack(self, sample: SampleData, states: Tensor) -> dict[str, Any]:
        return {"hidden_states": [layer.clone() for layer in states.unbind(1)]}

    def unpack(self, fields: dict[str, Any], num_layers: int) -> Tensor:
        torch: Any = import_module("torch")
        return torch.stack(fields["hidden_states"], 1)

    def seal(self, folder: Path, samples: SealedRun) -> tuple[str, ...]:
        names = super().seal(folder, samples)
        lengths = {str(entry.index): entry.tokens for entry in samples.entries if entry.file}
        write_whole(folder / _LENGTHS, [json.dumps(lengths).encode()])
        return (*names, _LENGTHS)
