"""Whether an earlier result was better."""

from __future__ import annotations

from typing import Any

from benchmarks.bench.cases import PLAIN

__all__ = ["MismatchError", "losses"]


class MismatchError(Exception):
    """Results that say nothing of each other."""


def losses(old: dict[str, Any], new: dict[str, Any], tolerance: float) -> list[str]:
    """One line for each case whose median ratio is lower by more than ``tolerance`` of what it was, or gone.

    The ratio is to vLLM's own prefill on the same machine, so the machines, and vLLM, may differ. What is measured may
    not.

    Raises:
        MismatchError: other prompts, layers, limits or another model.
    """
    differing = [
        f"{k}: {old['settings'].get(k)!r} then, {v!r} now" for k, v in _told(new) if old["settings"].get(k) != v
    ]
    if old["model"] != new["model"]:
        differing.append(f"model: {old['model']} then, {new['model']} now")
    asked_before, asked_now = ([name for name in PLAIN if name in result["asked"]] for result in (old, new))
    if asked_before != asked_now:
        differing.append(f"measured against the faster of: {asked_before} then, {asked_now} now")
    if differing:
        raise MismatchError("the earlier result is of something else: " + "; ".join(differing))
    lines = []
    for name, before in old["cases"].items():
        if name in PLAIN or name not in new["asked"]:
            continue
        was, now = before["ratio"]["median"], new["cases"].get(name, {}).get("ratio", {}).get("median")
        if now is None:
            lines.append(f"{name}: {was:.3f} then, and now it does not run")
        elif now < was * (1 - tolerance):
            lines.append(f"{name}: {was:.3f} then, {now:.3f} now, {1 - now / was:.1%} less")
    return lines


def _told(result: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in result["settings"].items() if name not in ("warmup", "kv_cache_gib")]
