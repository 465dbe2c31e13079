"""What each format refuses before anything starts, and what it says instead."""

from __future__ import annotations

import importlib.util
import logging
import re

import pytest

from vllm_compat.errors import UsageError
from vllm_compat.formats import FORMATS, archive, get_format, speculators
from vllm_compat.formats.once import warn_once
from vllm_compat.types import LayerId

Ids = tuple[LayerId, ...]
N = 61
PRE: Ids = (2, 30, 58, 60)
POST: Ids = (2, 30, 58, "norm")


@pytest.fixture(autouse=True)
def nothing_was_said() -> None:
    warn_once.cache_clear()


@pytest.fixture(autouse=True)
def everything_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks are of ids, whatever this environment has."""
    for module in (archive, speculators):
        monkeypatch.setattr(module, "find_spec", lambda _: True)


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        *[(name, ids) for name in ("safetensors", "per-layer") for ids in (PRE, POST, (60,), (5, 1), ("norm", 2))],
        *[(name, ids) for name in ("speculators", "speculators-fp8") for ids in (PRE, (2, 60), (1, 2, 3, 4, 60))],
        *[("speculators-v1", ids) for ids in (PRE, POST)],
        ("specforge", POST),
        *[("modelopt", ids) for ids in (PRE, POST, (2, "norm"))],
        ("eagle", ("norm",)),
    ],
)
def test_what_the_readers_read_is_not_refused(name: str, ids: Ids) -> None:
    """A check answers by raising alone, so that it returns is the whole assertion."""
    get_format(name).check(ids, N)
    get_format(name).check(ids, None)


@pytest.mark.parametrize(
    ("name", "ids", "use"),
    [
        ("speculators", POST, "2 30 58 60"),
        ("speculators", (2, 30, 58), "2 30 58 60"),
        ("speculators", (60, 2, 30, 58), "2 30 58 60"),
        ("speculators", (2, 60, "norm"), "2 60"),
        ("speculators-fp8", POST, "2 30 58 60"),
        ("speculators-v1", (2, 30, 58), "2 30 58 60"),
        ("speculators-v1", (2, 30, 60, "norm"), "2 30 norm"),
        ("specforge", PRE, "2 30 58 norm"),
        ("specforge", (2, 30, 58), "2 30 58 norm"),
        ("modelopt", ("norm", 2, 30), "2 30 60"),
        ("eagle", POST, "norm"),
    ],
)
def test_other_last_states(name: str, ids: Ids, use: str) -> None:
    with pytest.raises(UsageError, match=rf"format {name} .*found {' '.join(map(str, ids))}\. Use --layer-ids {use}$"):
        get_format(name).check(ids, N)


def test_an_unknown_depth() -> None:
    with pytest.raises(UsageError, match=re.escape("as the last id only, n - 1 (the state that leaves the last layer")):
        get_format("speculators").check(POST, None)


@pytest.mark.parametrize(
    ("name", "ids", "wanted"),
    [
        ("speculators-v1", (2, 58, 60), "3 auxiliary layers"),
        ("specforge", (1, 2, 30, 58, "norm"), "3 auxiliary layers"),
        ("modelopt", ("norm",), "at least one auxiliary layer"),
        ("speculators", (60,), "at least one auxiliary layer"),
    ],
)
def test_other_numbers_of_layers(name: str, ids: Ids, wanted: str) -> None:
    with pytest.raises(UsageError, match=f"{wanted} before the last state"):
        get_format(name).check(ids, N)


@pytest.mark.parametrize(
    ("name", "ids", "said"),
    [
        ("speculators", (30, 2, 58, 60), "not in ascending order"),
        ("speculators-v1", PRE, "0.4.0 to 0.7"),
        ("speculators-v1", POST, "speculators 0.3.0 only"),
        ("modelopt", PRE, "hidden_states_prenorm"),
    ],
)
def test_what_may_surprise_is_logged(name: str, ids: Ids, said: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        get_format(name).check(ids, N)
        get_format(name).check(ids, N)
    [record] = caplog.records
    assert said in record.getMessage()


@pytest.mark.parametrize(("name", "ids"), [("safetensors", (30, 2)), ("speculators", PRE), ("modelopt", POST)])
def test_nothing_to_say(name: str, ids: Ids, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        get_format(name).check(ids, N)
    assert not caplog.records


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("safetensors", "per-layer")])
def test_a_library_that_is_not_installed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (archive, speculators):
        monkeypatch.setattr(module, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match="torch"):
        get_format(name).check(PRE, N)


def test_the_real_environment_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for name, packages in (("speculators-v1", ["torch"]), ("speculators", ["torch", "datasets"])):
        if all(importlib.util.find_spec(package) for package in packages):
            get_format(name).check(PRE, N)
        else:
            with pytest.raises(UsageError, match=r"torch|datasets"):
                get_format(name).check(PRE, N)


@pytest.mark.parametrize(
    ("sample_id", "file"),
    [
        ("abc", "abc.pt"),
        ("a.b-c_d", "a.b-c_d.pt"),
        ("17", "17.pt"),
        ("a" * 128, "a" * 128 + ".pt"),
        ("a" * 129, "sample_5.pt"),
        (None, "sample_5.pt"),
        ("", "sample_5.pt"),
        ("..", "sample_5.pt"),
        (".a", "sample_5.pt"),
        ("a.", "sample_5.pt"),
        ("a/b", "sample_5.pt"),
        ("a\n", "sample_5.pt"),
        ("é", "sample_5.pt"),
        ("٣", "sample_5.pt"),
        ("sample_7", "sample_5.pt"),
        ("sample_7a", "sample_7a.pt"),
    ],
)
def test_names_of_modelopt(sample_id: str | None, file: str) -> None:
    assert str(get_format("modelopt").file(5, sample_id)) == file


def test_folders_of_specforge() -> None:
    assert [str(get_format("specforge").file(i, None)) for i in (0, 1999, 2000)] == [
        "rows_0-2000/data_0.ckpt",
        "rows_0-2000/data_1999.ckpt",
        "rows_2000-4000/data_2000.ckpt",
    ]
