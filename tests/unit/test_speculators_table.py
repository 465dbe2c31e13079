"""The table of speculators: every row is usable, a version finds its own, a pair with a vLLM is judged by probes."""

from __future__ import annotations

import datetime
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from matrix import drift
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from vllm_compat._detect import speculators
from vllm_compat._detect.capabilities import CAPABILITIES, capabilities
from vllm_compat._detect.speculators import SpeculatorsRelease, find_speculators, load_speculators, native_verdict
from vllm_compat.formats import FORMATS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RELEASES = load_speculators()
EACH_RELEASE = pytest.mark.parametrize("release", RELEASES, ids=[r.version for r in RELEASES])
VLLMS: list[str] = drift.recorded()
OWN_GENERATOR = [r for r in RELEASES if r.vllm]


def raw() -> dict[str, Any]:
    path = speculators._PACKAGED if speculators._PACKAGED.exists() else speculators._CHECKOUT
    table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    return table


@cache
def recorded(vllm: str) -> dict[str, bool]:
    return capabilities(drift.load(vllm))


def found(version: str) -> SpeculatorsRelease:
    release = find_speculators(Version(version))
    assert release is not None
    return release


def verdict(release: str, vllm: str) -> str:
    """What would go wrong with a recorded vLLM."""
    return "\n".join(native_verdict(found(release), Version(vllm), recorded(vllm)))


def read(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[SpeculatorsRelease, ...]:
    path = tmp_path / "speculators.toml"
    path.write_text(text, encoding="utf-8")
    monkeypatch.setattr(speculators, "_PACKAGED", path)
    return speculators._load.__wrapped__()[0]


def test_every_row_is_read() -> None:
    assert [r.version for r in RELEASES] == [row["version"] for row in raw()["release"]]
    assert len(RELEASES) >= 13


def test_a_row_has_only_keys_that_are_read() -> None:
    known = set(SpeculatorsRelease.__dataclass_fields__) - {"readers"}
    assert [set(row) - known for row in raw()["release"]] == [set()] * len(RELEASES)
    assert {frozenset(entry) for row in raw()["release"] for entry in row["formats"].values()} == {
        frozenset({"final", "reader"})
    }
    assert set(raw()) == {"faults", "failure", "release"}


def test_releases_are_unique_and_oldest_first() -> None:
    versions = [Version(r.version) for r in RELEASES]
    assert all(earlier < later for earlier, later in pairwise(versions))
    assert [str(v) for v in versions] == [v.base_version for v in versions]


def test_the_faults_of_a_release_are_defined_and_every_fault_is_some_releases() -> None:
    for release, row in zip(RELEASES, raw()["release"], strict=True):
        assert list(release.faults) == row.get("faults", [])
        assert release.limits == tuple(raw()["faults"][name] for name in release.faults)
    assert {name for r in RELEASES for name in r.faults} == set(raw()["faults"])


@EACH_RELEASE
def test_the_specifiers_and_requirements_of_a_release_parse(release: SpeculatorsRelease) -> None:
    assert str(SpecifierSet(release.vllm)) == release.vllm
    assert SpecifierSet(release.python).contains("3.12")
    names = [Requirement(text).name for text in (*release.needs, *release.without)]
    assert "torch" in names
    assert len(names) == len(set(names))


@EACH_RELEASE
def test_what_a_release_reads_are_formats_of_ours_with_a_final_state_and_a_reader(release: SpeculatorsRelease) -> None:
    assert set(release.formats) <= set(FORMATS)
    assert release.readers.keys() == release.formats.keys()
    assert set(release.formats.values()) <= {"pre-norm", "post-norm"}
    assert all(part.isidentifier() for reader in release.readers.values() for part in reader.split("."))


@EACH_RELEASE
def test_a_release_was_proven_on_a_day(release: SpeculatorsRelease) -> None:
    assert datetime.date.fromisoformat(release.proven) <= datetime.datetime.now(datetime.timezone.utc).date()


def test_a_failure_names_releases_of_the_table_and_something_that_tells() -> None:
    for failure in speculators._load()[1]:
        assert {r.version for r in RELEASES} >= set(failure.speculators) != set()
        assert failure.capability or failure.vllm
        assert failure.capability in {"", *CAPABILITIES}
        assert str(SpecifierSet(failure.vllm)) == failure.vllm
        assert failure.words


@EACH_RELEASE
@pytest.mark.parametrize("suffix", ["", "+local", ".post1"])
def test_a_release_is_found_whatever_its_local_part_and_post_release(suffix: str, release: SpeculatorsRelease) -> None:
    assert find_speculators(Version(release.version + suffix)) is release


@EACH_RELEASE
@pytest.mark.parametrize("suffix", ["a1", "rc1", ".dev3"])
def test_a_build_between_releases_has_no_row(suffix: str, release: SpeculatorsRelease) -> None:
    assert find_speculators(Version(release.version + suffix)) is None


def test_a_release_that_nobody_tried_has_no_row() -> None:
    assert find_speculators(Version("0.2.0")) is None
    assert find_speculators(Version("99.0")) is None
    assert find_speculators(Version("0.7.0.99")) is None


@pytest.mark.parametrize("release", OWN_GENERATOR, ids=[r.version for r in OWN_GENERATOR])
def test_a_generator_of_its_own_is_warned_of_on_every_vllm_but_those_it_asks_for(release: SpeculatorsRelease) -> None:
    quiet = [v for v in VLLMS if not verdict(release.version, v)]
    assert quiet == [v for v in VLLMS if SpecifierSet(release.vllm).contains(v)]
    assert quiet


@pytest.mark.parametrize("release", OWN_GENERATOR, ids=[r.version for r in OWN_GENERATOR])
def test_each_warning_names_more_than_the_specifier(release: SpeculatorsRelease) -> None:
    assert [v for v in VLLMS if verdict(release.version, v) == f"it asks for vLLM {release.vllm}"] == []


def test_a_server_is_warned_of_where_it_has_no_hidden_states() -> None:
    for release in RELEASES:
        if not release.vllm:
            without = [v for v in VLLMS if verdict(release.version, v)]
            assert without == VLLMS[: VLLMS.index("0.17.0")]


@pytest.mark.parametrize(
    ("release", "vllm", "words"),
    [
        ("0.3.0", "0.11.1", "never calls sample_tokens"),
        ("0.3.0", "0.11.1", "without block_size"),
        ("0.3.0", "0.16.0", "kv_cache_specs"),
        ("0.3.0", "0.25.0", "filed under other samples"),
        ("0.4.0", "0.11.0", "which this vLLM lacks: AttributeError"),
        ("0.4.0.1", "0.17.0", "eos_token_id"),
        ("0.4.0.1", "0.25.0", "model_runner.input_batch"),
        ("0.4.0.1", "0.29.0", "layout of the KV cache"),
        ("0.4.0.1", "0.33.0", "have moved: ImportError"),
        ("0.9.0", "0.16.0", "this vLLM serves none"),
    ],
)
def test_what_is_said_of_a_pair(release: str, vllm: str, words: str) -> None:
    said = verdict(release, vllm)
    assert words in said
    asked = found(release).vllm
    assert said.startswith(f"it asks for vLLM {asked}") == bool(asked)


def test_a_vllm_that_is_no_version_is_judged_by_what_it_has_alone() -> None:
    row = found("0.4.0")
    (words,) = native_verdict(row, None, {"two_phase_step": True, "eos_token_id_in_request": False})
    assert "eos_token_id" in words
    assert native_verdict(row, None, {}) == ()


@pytest.mark.parametrize(
    ("release", "vllm", "fits"),
    [
        ("0.3.0", "0.11.0+cpu", True),
        ("0.3.0", "0.11.0.post2", True),
        ("0.4.0", "0.16.0.post1+cpu", True),
        ("0.4.0", "0.12.1.dev5+gabc", True),
        ("0.4.0", "0.16.1rc1", False),
        ("0.3.0", "0.11.1.dev3", False),
        ("0.9.0", "0.1", True),
    ],
)
def test_a_build_fits_a_specifier_by_its_release(release: str, vllm: str, fits: bool) -> None:
    said = native_verdict(found(release), Version(vllm), {})
    assert any("it asks for" in words for words in said) is not fits


_TABLE = """
[faults]
a = "is wrong"
[[failure]]
speculators = ["1.0"]
capability = "x"
words = "breaks"
[[release]]
version = "1.0"
python = ">=3.10"
vllm = ""
source = "from nowhere"
formats.speculators = { final = "pre-norm", reader = "a.b.C" }
needs = ["torch==2.0"]
"""


def test_the_fields_of_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    least = SpeculatorsRelease(
        *("1.0", ">=3.10", "", "from nowhere"),
        {"speculators": "pre-norm"},
        {"speculators": "a.b.C"},
        ("torch==2.0",),
        (),
        {},
        "",
    )
    assert read(_TABLE, tmp_path, monkeypatch) == (least,)
    more = _TABLE + 'without = ["b"]\nfaults = ["a"]\nproven = 2026-01-02\n'
    (row,) = read(more, tmp_path, monkeypatch)
    assert (row.without, row.limits, row.proven) == (("b",), ("is wrong",), "2026-01-02")


def test_a_fault_that_is_not_defined_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError, match="b"):
        read(_TABLE + 'faults = ["b"]\n', tmp_path, monkeypatch)
