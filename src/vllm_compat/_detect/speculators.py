"""The second axis of the support table, `matrix/speculators.toml`: the releases of speculators.

What each asks of vLLM, how it obtains hidden states, and which of our formats its trainer reads.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:  # goes when Python 3.10 does
    import tomli as tomllib

__all__ = ["SpeculatorsRelease", "find_speculators", "load_speculators", "native_verdict"]

_PACKAGED = Path(__file__).with_name("speculators.toml")
_CHECKOUT = Path(__file__).parents[3] / "matrix" / "speculators.toml"


@dataclass(frozen=True, slots=True)
class SpeculatorsRelease:
    """One row.

    Attributes:
        version: the release.
        python: the interpreters that it accepts.
        vllm: the vLLM that it asks for; empty where it asks for none.
        source: how it obtains hidden states.
        formats: our format that its trainer reads -> the final state that the trainer wants in it: ``pre-norm`` or
            ``post-norm``.
        readers: format -> the class that reads it, dotted.
        needs: requirements beside it, for the tests.
        without: dependencies of its own that the tests do without.
        faults: name -> what it gets wrong in what it reads or writes.
        proven: date of the last run of the format tests that passed; empty where there was none.
    """

    version: str
    python: str
    vllm: str
    source: str
    formats: Mapping[str, str]
    readers: Mapping[str, str]
    needs: tuple[str, ...]
    without: tuple[str, ...]
    faults: Mapping[str, str]
    proven: str

    @property
    def limits(self) -> tuple[str, ...]:
        """The faults, in words."""
        return tuple(self.faults.values())


@dataclass(frozen=True, slots=True)
class _Failure:
    """What goes wrong when a release generates states on some vLLM.

    Attributes:
        speculators: the releases that fail like this.
        capability: of the vLLM, by name; empty where none tells.
        present: whether the vLLM fails them that has it, or the one that lacks it.
        vllm: the vLLMs that fail them, where no capability tells.
        words: what goes wrong.
    """

    speculators: tuple[str, ...]
    words: str
    capability: str = ""
    present: bool = True
    vllm: str = ""

    def occurs(self, vllm: Version | None, capabilities: Mapping[str, bool]) -> bool:
        """Whether this vLLM is one that fails them; an unknown version or capability fails nobody."""
        if self.capability and capabilities.get(self.capability) is not self.present:
            return False
        return not self.vllm or (vllm is not None and _matches(vllm, self.vllm))


def native_verdict(
    speculators: SpeculatorsRelease, vllm: Version | None, capabilities: Mapping[str, bool]
) -> tuple[str, ...]:
    """What would go wrong if a release's own generator of states met a vLLM, in words; empty where nothing is known to.

    Args:
        speculators: the release.
        vllm: the version of the vLLM; None where it is no version.
        capabilities: what that vLLM has, as ``detect().capabilities``.
    """
    found = [f.words for f in _load()[1] if speculators.version in f.speculators and f.occurs(vllm, capabilities)]
    if speculators.vllm and vllm is not None and not _matches(vllm, speculators.vllm):
        found.insert(0, f"it asks for vLLM {speculators.vllm}")
    return tuple(found)


def load_speculators() -> tuple[SpeculatorsRelease, ...]:
    """Every row, oldest release first."""
    return _load()[0]


def find_speculators(version: Version) -> SpeculatorsRelease | None:
    """The row of a version, whatever its local part; a build between releases has none."""
    return None if version.is_prerelease else _by_version().get(Version(version.base_version))


@cache
def _by_version() -> Mapping[Version, SpeculatorsRelease]:
    return {Version(r.version): r for r in load_speculators()}


@cache
def _load() -> tuple[tuple[SpeculatorsRelease, ...], tuple[_Failure, ...]]:
    path = _PACKAGED if _PACKAGED.exists() else _CHECKOUT
    data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    words: dict[str, str] = data["faults"]
    releases = tuple(
        SpeculatorsRelease(
            version=row["version"],
            python=row["python"],
            vllm=row["vllm"],
            source=row["source"],
            formats={name: entry["final"] for name, entry in row["formats"].items()},
            readers={name: entry["reader"] for name, entry in row["formats"].items()},
            needs=tuple(row["needs"]),
            without=tuple(row.get("without", ())),
            faults={name: words[name] for name in row.get("faults", ())},
            proven=str(row.get("proven", "")),
        )
        for row in data["release"]
    )
    failures = tuple(_Failure(tuple(f.pop("speculators")), **f) for f in data["failure"])
    return releases, failures


def _matches(version: Version, specifier: str) -> bool:
    """Whether a release, whatever its local part (``+cpu``) and post release, is one of those; a build between too."""
    release = version if version.is_prerelease else Version(version.base_version)
    return SpecifierSet(specifier).contains(release, prereleases=True)
