"""A comparison as a picture: cosine for each layer and position, a row of panels for each sample."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_compat.errors import UsageError
from vllm_compat.extract.files import storage
from vllm_compat.verify.compare import Recomputed
from vllm_compat.verify.table import worst_of_places

__all__ = ["draw", "require_matplotlib"]

_LEAST = 1e-6
_PLACES = 800  # a picture has no room for more, and would leave tokens out


def require_matplotlib() -> None:
    """Refuse early.

    Raises:
        UsageError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise UsageError(
            "--picture takes matplotlib, which is not installed; install it, or all of `vllm-compat[picture]`"
        )


def draw(found: Recomputed, path: Path, title: str) -> None:
    """Write the picture; the kind of file is that of its name, PNG by default.

    Raises:
        StorageError: it cannot be written.
    """
    figures: Any = import_module("matplotlib.figure")
    colors: Any = import_module("matplotlib.colors")
    names = [str(result.layer_id) for result in found.layers]
    height = 0.6 + len(found.samples) * (0.7 + 0.25 * len(names))
    figure = figures.Figure(figsize=(10, height), layout="constrained")
    panels = figure.subplots(len(found.samples), 1, squeeze=False)[:, 0]
    scale = colors.LogNorm(_LEAST, 1)
    cosines = found.cosines.tolist()
    begin, image = 0, None
    for panel, index, length in zip(panels, found.samples, found.lengths, strict=True):
        worst = [worst_of_places(row[begin : begin + length], _PLACES) for row in cosines]
        begin += length
        apart = [[max(1 - cosine, _LEAST) for cosine in row] for row in worst]
        image = panel.imshow(
            apart, norm=scale, cmap="viridis", aspect="auto", interpolation="nearest", extent=_extent(length, names)
        )
        panel.set_yticks(range(len(names)), names)
        panel.set_ylabel(f"sample {index}")
    panels[-1].set_xlabel("position")
    figure.suptitle(title)
    figure.colorbar(image, ax=panels, label="1 - cosine with HF transformers in float32")
    with storage(path, "written"):
        figure.savefig(path, format=path.suffix.removeprefix(".") or "png")


def _extent(length: int, names: list[str]) -> tuple[float, float, float, float]:
    """The axes: positions from left to right, layers from top to bottom."""
    return (-0.5, length - 0.5, len(names) - 0.5, -0.5)
