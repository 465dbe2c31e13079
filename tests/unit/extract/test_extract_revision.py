"""Which weights a model's name stands for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from vllm_compat.errors import UsageError
from vllm_compat.extract.plan import make_job
from vllm_compat.extract.revision import find_revision, local_folder

if TYPE_CHECKING:
    from tests.unit.extract.conftest import MakeConfig, WriteRows

COMMIT, OTHER = "0123456789abcdef" * 2 + "01234567", "f" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache, with one model in it."""
    refs = tmp_path / "hub" / "models--some--model" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text(COMMIT + "\n")
    (refs / "branch").write_text(OTHER)
    (refs / "broken").write_text("not a commit")
    (refs.parent / "snapshots" / COMMIT).mkdir(parents=True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("model", "revision", "found"),
    [
        ("some/model", None, COMMIT),
        ("some/model", "branch", OTHER),
        ("some/model", OTHER, OTHER),
        ("some/model", "broken", None),
        ("some/model", "missing", None),
        ("other/model", None, None),
    ],
)
def test_a_name_on_the_hub(model: str, revision: str | None, found: str | None) -> None:
    assert find_revision(model, {"revision": revision, "seed": 1}) == found


def test_the_folder_of_a_model(cache: Path, tmp_path: Path) -> None:
    snapshot = cache / "models--some--model" / "snapshots" / COMMIT
    assert local_folder("some/model", {}) == snapshot
    assert local_folder("some/model", {"revision": COMMIT}) == snapshot
    assert local_folder("some/model", {"revision": OTHER}) is None
    assert local_folder("other/model", {}) is None
    assert local_folder(str(tmp_path), {}) == tmp_path


def test_a_snapshot_is_its_commit_also_through_a_link(cache: Path, tmp_path: Path) -> None:
    folder = cache / "models--some--model" / "snapshots" / COMMIT
    assert find_revision(str(folder), {}) == COMMIT
    (tmp_path / "link").symlink_to(folder)
    assert find_revision(str(tmp_path / "link"), {}) == COMMIT


@pytest.mark.parametrize(
    ("variable", "place"),
    [
        ("HF_HUB_CACHE", "."),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
        ("HOME", ".cache/huggingface/hub"),
    ],
)
def test_the_cache_is_where_the_hubs_client_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, place: str
) -> None:
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    refs = tmp_path / place / "models--a--b" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text(COMMIT)
    assert find_revision("a/b", {}) == COMMIT


def _grow(folder: Path) -> None:
    (folder / "model-1.safetensors").write_bytes(b"xyz")


def _reindex(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")


def _configure(folder: Path) -> None:
    (folder / "config.json").write_text('{"vocab_size": 7}')


@pytest.mark.parametrize("change", [_grow, _reindex, _configure])
def test_a_folder_has_a_fingerprint(tmp_path: Path, change: Callable[[Path], None]) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model-1.safetensors").write_bytes(b"xy")
    first = find_revision(str(tmp_path), {})
    assert first is not None
    assert first.startswith("xxh3:")
    assert find_revision(str(tmp_path), {}) == first
    (tmp_path / "README.md").write_text("of no account")
    assert find_revision(str(tmp_path), {}) == first
    change(tmp_path)
    assert find_revision(str(tmp_path), {}) != first


def test_the_code_of_a_model_counts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    without = find_revision(str(tmp_path), {})
    (tmp_path / "modeling_own.py").write_text("a = 1")
    found = find_revision(str(tmp_path), {})
    (tmp_path / "modeling_own.py").write_text("a = 2")
    assert len({without, found, find_revision(str(tmp_path), {})}) == 3


def test_code_of_an_unknown_revision_is_not_run(config: MakeConfig, write_rows: WriteRows) -> None:
    """What runs must be what the record can name."""
    write_rows([{"input_ids": [1]}])
    settings = config(model="some/unfetched-model", trust_remote_code=True)
    with pytest.raises(UsageError, match="which revision that is is not known"):
        make_job(settings)
    pinned = config(model="some/unfetched-model", trust_remote_code=True, engine_options={"revision": COMMIT})
    assert make_job(pinned).revision == COMMIT
