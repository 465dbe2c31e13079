"""The cases by name; each is run in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from benchmarks.bench.cases.base import Figures, NotAvailableError, Work
from benchmarks.bench.settings import Settings

__all__ = ["CASES", "PLAIN", "Figures", "NotAvailableError", "Work", "get_case"]

PLAIN = ("plain-eager", "plain-compiled")
"""vLLM's own prefill; the faster of them is what the others are measured against."""

CASES = {
    "plain-eager": "plain:eager",
    "plain-compiled": "plain:compiled",
    "extract": "extract:extract",
    "capture": "capture:capture",
    "speculators": "speculators:speculators",
    "native": "native:native",
}
"""Name -> module and function. Not imported before they run: their packages may be missing."""


def get_case(name: str) -> Callable[[Settings, Work], Figures]:
    module, _, function = CASES[name].partition(":")
    found: Callable[[Settings, Work], Figures] = getattr(import_module(f"{__name__}.{module}"), function)
    return found
