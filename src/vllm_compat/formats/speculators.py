"""``speculators``: what speculators reads from 0.5 on, an arrow dataset and the states beside it."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import ClassVar

from vllm_compat.errors import UsageError
from vllm_compat.extract.files import write_whole
from vllm_compat.formats.archive import saved
from vllm_compat.formats.arrow import write_dataset
from vllm_compat.formats.base import SealedRun
from vllm_compat.formats.last_state import check_eagle_ids
from vllm_compat.formats.safetensors import Safetensors
from vllm_compat.types import LayerId

__all__ = ["Speculators"]

_FREQUENCY = "token_freq.pt"


class Speculators(Safetensors):
    """``hidden_states/hs_{i}.safetensors`` as in ``safetensors``, with the last state, before the norm, as last layer.

    At the seal: the rows as an arrow dataset in the run's folder, and ``token_freq.pt``, how often each token is there
    under the loss mask. The reader joins both by the row's number, so a skipped sample keeps its row. Where the input
    has no loss mask, it is ones here.
    """

    name: ClassVar[str] = "speculators"
    description: ClassVar[str] = "arrow dataset, token_freq.pt and hidden_states/hs_{i}.safetensors"
    readers: ClassVar[str] = "speculators 0.5.0 and later (last state n - 1)"
    takes_rows: ClassVar[bool] = True

    def check(self, layer_ids: tuple[LayerId, ...], num_layers: int | None) -> None:
        missing = [package for package in ("torch", "datasets") if not find_spec(package)]
        if missing:
            raise UsageError(
                f"format {self.name} has an arrow dataset, which takes the package(s) {' and '.join(missing)}: "
                f"pip install {' '.join(missing)}"
            )
        check_eagle_ids(self.name, layer_ids, num_layers, pre_norm=True, post_norm=False)

    def file(self, index: int, sample_id: str | None) -> PurePosixPath:
        return PurePosixPath(f"hidden_states/hs_{index}.safetensors")

    def seal(self, folder: Path, samples: SealedRun) -> tuple[str, ...]:
        names = super().seal(folder, samples)
        frequency: Counter[int] = Counter()
        for row in samples.rows():
            mask = row.loss_mask or (1,) * len(row.token_ids)
            frequency.update(token for token, counts in zip(row.token_ids, mask, strict=True) if counts)
        write_whole(folder / _FREQUENCY, [saved(dict(frequency))])
        return (*names, _FREQUENCY, *write_dataset(folder, samples.rows()))
