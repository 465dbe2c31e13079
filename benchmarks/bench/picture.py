"""The ratios as a picture."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["draw"]


def draw(result: dict[str, Any], path: Path) -> bool:
    """A bar for each case and a dot for each of its turns; False where matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        return False
    figures: Any = import_module("matplotlib.figure")
    names = list(result["cases"])
    figure = figures.Figure(figsize=(8, 1.2 + 0.5 * len(names)), layout="constrained")
    panel = figure.subplots()
    for place, name in enumerate(names):
        speeds = [turn["tokens_per_second"] for turn in result["turns"] if turn["case"] == name]
        median = result["cases"][name]["tokens_per_second"]["median"]
        ratio = result["cases"][name].get("ratio")
        panel.barh(place, median, color="tab:gray" if name == result["baseline"] else "tab:blue", alpha=0.6)
        panel.plot(speeds, [place] * len(speeds), "k.", markersize=5)
        panel.annotate(f" {ratio['median']:.3f}" if ratio else "", (max(speeds), place), va="center")
    panel.set_yticks(range(len(names)), names)
    panel.invert_yaxis()
    panel.set_xmargin(0.12)
    panel.set_xlabel("tokens/s; the number is the median ratio to the grey bar")
    panel.set_title(f"vLLM {result['versions']['vllm_version']}, {result['model']}")
    figure.savefig(path)
    return True
