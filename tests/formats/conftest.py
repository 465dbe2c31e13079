"""Shared by the format tests: the installed speculators' row of matrix/speculators.toml, and what was written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import version

import pytest
from packaging.version import Version
from rows import Row, make_rows

from vllm_compat._detect.speculators import SpeculatorsRelease, find_speculators

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # 0.3.0 compiles its model's forward even on the CPU

_INSTALLED = version("speculators")
_FOUND = find_speculators(Version(_INSTALLED))
if _FOUND is None:
    raise pytest.UsageError(f"speculators {_INSTALLED} has no row in matrix/speculators.toml: give it one")
RELEASE: SpeculatorsRelease = _FOUND
collect_ignore = [
    f"test_{name.replace('-', '_')}.py"
    for name in ("speculators-v1", "speculators", "speculators-fp8")
    if name not in RELEASE.formats
]


@pytest.fixture(scope="session")
def release() -> SpeculatorsRelease:
    return RELEASE


@pytest.fixture(scope="session")
def rows() -> Sequence[Row]:
    return make_rows()
