"""A behaviour: one way of doing one thing that varies, and what of vLLM it stands on."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import ClassVar

from vllm_compat._detect.need import Need
from vllm_compat._detect.surface import Symbols

__all__ = ["Behaviour", "Verdict"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a behaviour fits this vLLM, and why.

    Attributes:
        variation: what varies, the name of the module in ``_adapters``.
        name: the behaviour's own.
        fits: the answer.
        reason: the evidence, in a few words.
        missing: the symbols it lacks.
    """

    variation: str
    name: str
    fits: bool
    reason: str
    missing: tuple[str, ...] = ()


class Behaviour(ABC):
    """One way of doing one thing that varies."""

    variation: ClassVar[str]
    name: ClassVar[str]
    needs: ClassVar[tuple[Need, ...]] = ()
    """Symbols without which it cannot work."""
    unless: ClassVar[tuple[Need, ...]] = ()
    """Symbols whose presence makes it wrong."""

    @classmethod
    def judge(cls, surface: Symbols) -> Verdict:
        """Accept or refuse this behaviour for the vLLM that ``surface`` shows."""
        missing = tuple(m for need in cls.needs for m in need.missing(surface))
        if missing:
            return Verdict(cls.variation, cls.name, False, f"missing {', '.join(missing)}", missing)
        present = [need.symbol for need in cls.unless if not need.missing(surface)]
        if present:
            return Verdict(cls.variation, cls.name, False, f"{', '.join(present)} exists")
        return Verdict(cls.variation, cls.name, True, f"found {', '.join(n.symbol for n in cls.needs)}")
