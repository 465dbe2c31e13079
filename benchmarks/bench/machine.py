"""What the figures are of: processor, memory, device and versions. No names of machines, and no paths."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vllm_compat.extract.record import versions as own_versions

__all__ = ["cores", "describe", "load_average", "versions"]

_PACKAGES = ("torch", "transformers", "speculators", "numpy")


def describe() -> dict[str, Any]:
    return {
        "processor": _processor(),
        "cores": len(cores()),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "devices": _devices(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), **own_versions()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if commit := _commit():
        found["commit"] = commit
    return found


def cores() -> list[int]:
    """Those that this process may use."""
    return sorted(os.sched_getaffinity(0))


def load_average() -> float:
    """Of the last minute: what ran here beside us, and ourselves."""
    return round(os.getloadavg()[0], 2)


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _devices() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    return _told("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()


def _commit() -> str:
    here = str(Path(__file__).parent)
    commit = _told("git", "-C", here, "rev-parse", "--short=12", "HEAD")
    return (
        f"{commit} and changes"
        if commit and _told("git", "-C", here, "status", "--porcelain", "--", "..", "../../src")
        else commit
    )


def _told(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
