"""A comparison as text: a line of figures for each layer, and a line that shows where along the tokens it differs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from vllm_compat.verify.compare import LayerResult, Recomputed

__all__ = ["heat", "table", "worst_of_places"]

_SHADES = " .:-=+*#%@"
_WIDTH = 64
_LEAST, _MOST = -6.0, 0.0  # decimal logarithm of 1 - cosine, from the lightest shade to the darkest


def table(found: Recomputed) -> str:
    """Errors are relative, of each token: typical is their root mean square."""
    head = (
        "layer",
        "typical",
        "median",
        "worst token",
        "HF bfloat16",
        "bound",
        "nearest other",
        "off by one",
        "verdict",
    )
    rows: list[tuple[str, ...]] = [head]
    for result in found.layers:
        sample, position = found.place(result.ours.worst_at)
        rows.append(
            (
                str(result.layer_id),
                f"{result.ours.typical:.2e}",
                f"{result.ours.median:.2e}",
                f"{result.ours.worst:.2e} ({sample}:{position})",
                f"{result.noise.typical:.2e}",
                f"{result.bound:.2e}",
                f"{result.nearest} at {result.nearest_error:.2e}",
                _control(result),
                "ok" if result.ok else f"WRONG: {found.diagnose(result)}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)) for row in rows]
    return "\n".join(f"{line}  {row[-1]}" for line, row in zip(lines, rows, strict=True))


def heat(found: Recomputed) -> str:
    """For each layer the tokens of all samples from left to right, the worst of those that share a place.

    Shades are steps of ``1 - cosine`` from 1e-6 to 1.
    """
    names = [str(result.layer_id) for result in found.layers]
    width = max(map(len, names))
    lines = [
        f"{name:>{width}} |{''.join(map(_shade, worst_of_places(row, _WIDTH)))}|"
        for name, row in zip(names, found.cosines.tolist(), strict=True)
    ]
    scale = f"{'':{width}}  1 - cosine, '{_SHADES[1]}' from 1e-{-_LEAST:.0f} to '{_SHADES[-1]}' at 1; samples "
    return "\n".join([*lines, scale + " ".join(map(str, found.samples))])


def _control(result: LayerResult) -> str:
    """Whether another layer in this one's place would be seen."""
    if not result.ok:
        return "-"
    return f"{result.looks_like[0]} in the noise" if result.looks_like else "would show"


def worst_of_places(cosines: Sequence[float], places: int) -> list[float]:
    """The least cosine of each of so many places along the tokens, or of each token where these are fewer."""
    width = min(places, len(cosines))
    edges = [len(cosines) * i // width for i in range(width + 1)]
    return [min(cosines[a:b]) for a, b in itertools.pairwise(edges)]


def _shade(cosine: float) -> str:
    apart = 1 - cosine
    if math.isnan(apart):
        return "?"
    if apart < 10**_LEAST:
        return _SHADES[0]
    place = (math.log10(apart) - _LEAST) / (_MOST - _LEAST)
    return _SHADES[min(1 + int(place * (len(_SHADES) - 1)), len(_SHADES) - 1)]
