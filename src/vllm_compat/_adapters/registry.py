"""Every behaviour there is, and the choice among them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from vllm_compat._adapters.base import Behaviour, Verdict
from vllm_compat._detect.surface import Symbols

__all__ = ["VARIATIONS", "Adapter", "behaviours", "choose", "named"]

VARIATIONS = ("request", "step", "outputs", "rows", "states")
"""In the order a step meets them. ``rows`` and ``states`` are settled in the worker, on the live runner and model."""
ENTRY_POINTS = "vllm_compat.adapters"
"""A distribution of a vendor's adds a ``Behaviour`` under this group; it is asked before our own."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """What serves a vLLM: for each variation the behaviours that fit, and every verdict with its reason.

    Attributes:
        chosen: variation -> names of the behaviours that fit, the preferred one first.
        verdicts: all that were considered.
    """

    chosen: Mapping[str, tuple[str, ...]]
    verdicts: tuple[Verdict, ...]

    @property
    def name(self) -> str:
        """The choices in one line, such as ``request=by-signature step=two-phase ...``."""
        return " ".join(f"{variation}={'|'.join(names) or 'none'}" for variation, names in self.chosen.items())

    @property
    def missing(self) -> tuple[str, ...]:
        """The symbols lacking in each variation that nothing serves, by the behaviour that came closest."""
        return tuple(
            m for variation, names in self.chosen.items() if not names for m in self._nearest(variation).missing
        )

    def _nearest(self, variation: str) -> Verdict:
        # A behaviour refused because something exists has nothing missing, and so is not the one to mend.
        return min(
            (v for v in self.verdicts if v.variation == variation), key=lambda v: (not v.missing, len(v.missing))
        )

    @property
    def nearest(self) -> str:
        """The same line, with the closest behaviour where none fits."""
        return " ".join(f"{v}={'|'.join(names) or self._nearest(v).name}" for v, names in self.chosen.items())


@cache
def behaviours(variation: str) -> tuple[type[Behaviour], ...]:
    """The behaviours of one variation, those of other distributions first."""
    own: tuple[type[Behaviour], ...] = import_module(f"vllm_compat._adapters.{variation}").BEHAVIOURS
    return (*(b for b in _registered() if b.variation == variation), *own)


def _registered() -> Iterator[type[Behaviour]]:
    for entry in entry_points(group=ENTRY_POINTS):
        behaviour = entry.load()
        if not (isinstance(behaviour, type) and issubclass(behaviour, Behaviour)):
            raise TypeError(
                f"entry point {entry.name!r} of group {ENTRY_POINTS!r} is {behaviour!r}, not a Behaviour class"
            )
        if behaviour.variation not in VARIATIONS:
            raise TypeError(f"{behaviour!r} varies {behaviour.variation!r}; known are {', '.join(VARIATIONS)}")
        yield behaviour


def choose(surface: Symbols) -> Adapter:
    """Judge every behaviour against one vLLM."""
    verdicts = tuple(b.judge(surface) for variation in VARIATIONS for b in behaviours(variation))
    chosen = {v: tuple(x.name for x in verdicts if x.variation == v and x.fits) for v in VARIATIONS}
    return Adapter(chosen, verdicts)


def named(variation: str, name: str) -> Any:
    """A behaviour by its name."""
    return next(b for b in behaviours(variation) if b.name == name)()
