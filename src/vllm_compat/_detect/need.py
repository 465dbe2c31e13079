"""What somebody stands on: a symbol of vLLM's that must be there."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_compat._detect.surface import Symbols

__all__ = ["Need"]


@dataclass(frozen=True, slots=True)
class Need:
    """A symbol that must exist.

    Attributes:
        symbol: as ``Surface.find`` takes it.
        parameters: names that it must accept.
        supplied: every name that we can pass; a required parameter outside of these is one we do not know. None: not
            looked at.
    """

    symbol: str
    parameters: tuple[str, ...] = ()
    supplied: frozenset[str] | None = None

    def missing(self, surface: Symbols) -> tuple[str, ...]:
        """What is not there, each as text that names the symbol; empty when the need is met."""
        found = surface.find(self.symbol)
        if found is None:
            return (self.symbol,)
        lost = [
            f"{self.symbol}({p})" for p in self.parameters if p not in found.parameters and "**" not in found.parameters
        ]
        if self.supplied is not None:
            lost += [f"{self.symbol}(unknown required {p})" for p in sorted(found.required - self.supplied)]
        return tuple(lost)
