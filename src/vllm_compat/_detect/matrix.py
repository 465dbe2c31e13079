"""The support table, `matrix/vllm.toml`: which releases were proven, how, and with which limits.

It is about trust, not about choosing code.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:  # goes when Python 3.10 does
    import tomli as tomllib

__all__ = ["Release", "find_release", "load_matrix", "proven_releases"]

_PACKAGED = Path(__file__).with_name("vllm.toml")
_CHECKOUT = Path(__file__).parents[3] / "matrix" / "vllm.toml"


@dataclass(frozen=True, slots=True)
class Release:
    """One row.

    Attributes:
        vllm: the release.
        torch: the torch it pins.
        cpu_wheel: the requirement that installs a CPU build of it that runs; empty where there is none.
        with_it: further requirements of that CPU build.
        without_dependencies: the same, to be installed without their own dependencies.
        environment: variables its CPU build needs.
        proven: how -> date of the last run that passed. ``cpu``: the live suite on the CPU build; ``gpu``: on one H200.
        faults: name -> what this release's own kernels get wrong, as far as the live suite minds.
    """

    vllm: str
    torch: str
    cpu_wheel: str
    with_it: tuple[str, ...]
    without_dependencies: tuple[str, ...]
    environment: Mapping[str, str]
    proven: Mapping[str, str]
    faults: Mapping[str, str]

    @property
    def limits(self) -> tuple[str, ...]:
        """The faults, in words."""
        return tuple(self.faults.values())

    @property
    def standing(self) -> str:
        """How far it can be trusted, in one line."""
        if not self.proven:
            return f"{self.vllm} is known, and not yet proven live"
        return f"{self.vllm} is proven live on " + ", ".join(f"{how} ({day})" for how, day in self.proven.items())


@cache
def load_matrix() -> tuple[Release, ...]:
    """Every row, oldest release first."""
    path = _PACKAGED if _PACKAGED.exists() else _CHECKOUT
    data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    words: dict[str, str] = data["faults"]
    return tuple(
        Release(
            vllm=row["vllm"],
            torch=row["torch"],
            cpu_wheel=row.get("cpu_wheel", ""),
            with_it=tuple(row.get("with_it", ())),
            without_dependencies=tuple(row.get("without_dependencies", ())),
            environment=row.get("environment", {}),
            proven={how: str(day) for how, day in row.get("proven", {}).items()},
            faults={name: words[name] for name in row.get("faults", ())},
        )
        for row in data["release"]
    )


def find_release(version: Version) -> Release | None:
    """The row of a version, whatever its local part (``+cpu``) or post release; a build between releases has none."""
    if version.is_prerelease:
        return None
    return next((r for r in load_matrix() if Version(r.vllm) == Version(version.base_version)), None)


def proven_releases() -> tuple[str, ...]:
    """The releases proven live, oldest first."""
    return tuple(r.vllm for r in load_matrix() if r.proven)
