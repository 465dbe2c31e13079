"""Median and spread of what the turns found."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.bench.cases import PLAIN

__all__ = ["baseline_of", "summarize"]


def baseline_of(turns: Sequence[dict[str, Any]]) -> str:
    """The faster of vLLM's own ways, by the median; "" where none ran."""
    speeds = {name: _speeds(turns, name) for name in PLAIN}
    medians = {name: statistics.median(found.values()) for name, found in speeds.items() if found}
    return max(medians, key=lambda name: medians[name], default="")


def summarize(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Case -> its speed, and its ratio to the baseline of the same turn."""
    baseline = baseline_of(turns)
    reference = _speeds(turns, baseline)
    summary = {}
    for name in dict.fromkeys(turn["case"] for turn in turns):
        speeds = _speeds(turns, name)
        found: dict[str, Any] = {"tokens_per_second": _spread(list(speeds.values()), 1)}
        if ratios := [speed / reference[turn] for turn, speed in speeds.items() if turn in reference]:
            found["ratio"] = _spread(ratios, 4)
        for fact in ("mb_per_second", "stalled_seconds"):
            if values := [turn[fact] for turn in turns if turn["case"] == name and fact in turn]:
                found[fact] = _spread(values, 3)
        summary[name] = found
    return summary


def _speeds(turns: Sequence[dict[str, Any]], name: str) -> dict[int, float]:
    return {turn["turn"]: turn["tokens"] / turn["seconds"] for turn in turns if turn["case"] == name}


def _spread(values: Sequence[float], digits: int) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }
