"""The support table, `matrix/vllm.toml`: which releases were proven, how, and with which limits.

It is about trust, not about choosing code. The only place where versions are compared.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
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

__all__ = ["LIVE", "Place", "Release", "find_release", "load_matrix", "load_proofs", "place", "proven_releases"]

LIVE = ("cpu", "gpu", "gpu2")  # the kinds of proof that are of a release as it is, running
_PACKAGED = Path(__file__).with_name("vllm.toml")
_CHECKOUT = Path(__file__).parents[3] / "matrix" / "vllm.toml"


@dataclass(frozen=True, slots=True)
class Release:
    """One row.

    Attributes:
        vllm: the release.
        torch: the torch that its CPU build pins; without one, the official wheel's.
        cpu_wheel: the requirement that installs a CPU build of it that runs; empty where there is none.
        with_it: further requirements of that CPU build.
        without_dependencies: the same, to be installed without their own dependencies.
        environment: variables its CPU build needs.
        proven: kind of proof -> date of the last run that passed; ``load_proofs`` has the kinds in words.
        faults: name -> what this release gets wrong on the CPU, as far as the live suite minds, with its link.
        python: the interpreters that its wheels accept, a version specifier.
        official_torch: the torch that the official wheel pins, where that is not ``torch``.
        no_cpu: why there is no CPU build that runs; empty where there is one.
        preload: shared libraries that the worker of its CPU build wants in ``LD_PRELOAD``.
        note: another limit, in words.
        mixture: the requirement whose files, with the kernels of another release, run on the CPU; empty where the
            release has a CPU build of its own, or nobody has tried.
        kernels_of: that other release, whose CPU build gives torch and dependencies, too.
    """

    vllm: str
    torch: str
    cpu_wheel: str
    with_it: tuple[str, ...]
    without_dependencies: tuple[str, ...]
    environment: Mapping[str, str]
    proven: Mapping[str, str]
    faults: Mapping[str, str]
    python: str = ""
    official_torch: str = ""
    no_cpu: str = ""
    preload: tuple[str, ...] = ()
    note: str = ""
    mixture: str = ""
    kernels_of: str = ""

    @property
    def limits(self) -> tuple[str, ...]:
        """The faults and the note, in words."""
        return (*self.faults.values(), *([self.note] if self.note else []))

    @property
    def standing(self) -> str:
        """How far it can be trusted, in one line."""
        live = ", ".join(f"{how} ({day})" for how, day in self.proven.items() if how in LIVE)
        if live:
            return f"{self.vllm} is proven live on {live}"
        if "mixture" in self.proven:
            return f"{self.vllm}: proven live only in a mixture with other CPU kernels ({self.proven['mixture']})"
        if "surface" in self.proven:
            return f"{self.vllm}: the surface is known ({self.proven['surface']}), not proven live"
        return f"{self.vllm} is known, and not yet proven live"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a version lies in the table.

    A row's range begins with the first development build of its release and ends where the next row's begins, so that
    every version is in one range, or before the first.

    Attributes:
        version: any version: a release, a candidate, a nightly.
        release: the row in whose range it is; None before the first.
    """

    version: Version
    release: Release | None

    @property
    def exact(self) -> bool:
        """Whether it is that release itself, whatever its local part (``+cpu``) or post release."""
        return (
            self.release is not None
            and not self.version.is_prerelease
            and Version(self.version.base_version) == Version(self.release.vllm)
        )

    @property
    def standing(self) -> str:
        """How far it can be trusted, in one line."""
        rows = load_matrix()
        if self.release is None:
            return f"{self.version} is older than {rows[0].vllm}, the oldest release in the table"
        if self.exact:
            return self.release.standing
        if self.version < Version(self.release.vllm):
            return f"{self.version} is a build before {self.release.vllm}; {self.release.standing}"
        if self.release is rows[-1]:
            return f"{self.version} is newer than {self.release.vllm}, the newest release in the table"
        return f"{self.version} is a build after {self.release.vllm}; {self.release.standing}"


@cache
def load_matrix() -> tuple[Release, ...]:
    """Every row, oldest release first."""
    data = _read()
    faults = {name: _with_link(**fault) for name, fault in data["faults"].items()}
    return tuple(
        Release(
            vllm=row["vllm"],
            torch=row["torch"],
            cpu_wheel=row.get("cpu_wheel", ""),
            with_it=tuple(row.get("with_it", ())),
            without_dependencies=tuple(row.get("without_dependencies", ())),
            environment=row.get("environment", {}),
            proven={how: str(day) for how, day in row.get("proven", {}).items()},
            faults={name: faults[name] for name in row.get("faults", ())},
            python=row["python"],
            official_torch=row.get("official_torch", ""),
            no_cpu=row.get("no_cpu", ""),
            preload=tuple(row.get("preload", ())),
            note=row.get("note", ""),
            mixture=row.get("mixture", ""),
            kernels_of=row.get("kernels_of", ""),
        )
        for row in data["release"]
    )


def load_proofs() -> dict[str, str]:
    """Kind of proof -> what it means, in words."""
    proofs: dict[str, str] = _read()["proofs"]
    return proofs


def place(version: Version) -> Place:
    """Where any version lies in the table."""
    rows = load_matrix()
    index = bisect_right([Version(f"{r.vllm}.dev0") for r in rows], version)
    return Place(version, rows[index - 1] if index else None)


def find_release(version: Version) -> Release | None:
    """The row of a version, whatever its local part (``+cpu``) or post release; a build between releases has none."""
    found = place(version)
    return found.release if found.exact else None


def proven_releases() -> tuple[str, ...]:
    """The releases proven live as they are, oldest first."""
    return tuple(r.vllm for r in load_matrix() if not r.proven.keys().isdisjoint(LIVE))


def _read() -> dict[str, Any]:
    path = _PACKAGED if _PACKAGED.exists() else _CHECKOUT
    found: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    return found


def _with_link(words: str, link: str = "") -> str:
    return f"{words} ({link})" if link else words
