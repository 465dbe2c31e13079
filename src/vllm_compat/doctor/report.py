"""One report: the decisions first, then what they rest on."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from vllm_compat import __version__
from vllm_compat.detection import Detection
from vllm_compat.doctor.model import ModelVerdict
from vllm_compat.doctor.pair import judge_pair
from vllm_compat.doctor.statement import Statement

__all__ = ["make_report"]

_NEIGHBOURS = ("torch", "transformers", "speculators", "safetensors")


def make_report(found: Detection, model: ModelVerdict | None = None) -> dict[str, Any]:
    """What ``doctor`` prints, in plain types: sections of statements, then what ``detect`` prints and more of it."""
    versions = {name: _version(name) for name in _NEIGHBOURS}
    decision, pair = judge_pair(found, versions["speculators"])
    decisions = [Statement("vllm", found.supported, found.standing, "matrix/vllm.toml; the verdicts below"), decision]
    sections: dict[str, Iterable[Statement]] = {"decision": decisions, "pair": pair}
    if model:
        decisions += [model.decision, model.runner, model.natively]
        sections |= {"model": model.statements, "native": model.native}
    return {
        **{name: {s.name: s.as_dict() for s in statements} for name, statements in sections.items()},
        **found.as_dict(),
        "vllm_compat": __version__,
        "python": platform.python_version(),
        "neighbours": versions,
    }


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
