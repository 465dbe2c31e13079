"""Which of the two last states the generator gives: what the installed trainer takes."""

from __future__ import annotations

from importlib import metadata

import pytest

import vllm_compat
from vllm_compat.speculators import final_state
from vllm_compat.speculators.final_state import captured_ids, installed_final_state


@pytest.mark.parametrize(
    ("version", "expected", "words"),
    [
        ("0.3.0", "post-norm", "applies no norm"),
        ("0.4.0", "pre-norm", "applies the norm itself"),
        ("0.4.0.1", "pre-norm", "applies the norm itself"),
        ("0.7.0.2", "pre-norm", "applies the norm itself"),
        ("0.9.0", "pre-norm", "nothing is known"),  # its trainer reads no such files
        ("0.3.0+local", "post-norm", "applies no norm"),
        ("0.4.0.dev3", "pre-norm", "nothing is known"),
        ("of my own", "pre-norm", "Invalid version"),
    ],
)
def test_it_is_that_of_the_installed_speculators(
    version: str, expected: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(final_state, "version", lambda _: version)
    found, why = installed_final_state()
    assert found == expected
    assert words in why


def test_without_speculators_it_is_before_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(final_state, "version", none)
    assert installed_final_state() == ("pre-norm", "no speculators is installed")


def test_only_the_last_entry_that_is_the_last_layer_becomes_the_norm() -> None:
    assert captured_ids([2, 5], 6, "post-norm") == (2, "norm")
    assert captured_ids([5, 2], 6, "post-norm") == (5, 2)
    assert captured_ids([5, 5], 6, "post-norm") == (5, "norm")
    assert captured_ids([2, 4], 6, "post-norm") == (2, 4)
    assert captured_ids([2, 5], 6, "pre-norm") == (2, 5)


def test_another_word_is_refused() -> None:
    with pytest.raises(vllm_compat.UsageError, match="one of pre-norm, post-norm; found 'postnorm'"):
        captured_ids([2, 5], 6, "postnorm")  # type: ignore[arg-type]
