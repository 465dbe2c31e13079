"""The installed vLLM and speculators, taken together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from packaging.version import InvalidVersion, Version

from vllm_compat._detect.speculators import SpeculatorsRelease, find_speculators, native_verdict
from vllm_compat.detection import Detection
from vllm_compat.doctor.statement import Statement

__all__ = ["judge_pair"]

_DISTRIBUTION = "metadata of the distribution speculators"
_TABLE = "matrix/speculators.toml"


def judge_pair(found: Detection, speculators: str | None) -> tuple[Statement, tuple[Statement, ...]]:
    """What the installed speculators asks for, would run into here, and reads.

    Args:
        found: the vLLM.
        speculators: the installed version; None where there is none.

    Returns:
        The decision, and what it rests on.
    """
    if speculators is None:
        text = "not installed, and extracting needs none"
        return Statement("speculators", None, text, _DISTRIBUTION), ()
    release = _find(speculators)
    if release is None:
        text = f"{speculators} is installed; nothing is known of it here"
        return Statement("speculators", None, text, _DISTRIBUTION), ()
    wrong = _failures(replace(release, vllm=""), found)
    text = f"{speculators} is installed; its trainer reads {', '.join(release.formats) or 'none of our formats'}"
    if wrong:
        text += f"; generating states by itself, it would fail here in {len(wrong)} way(s)"
    where = f"{_TABLE}: {release.version}"
    return Statement("speculators", speculators, text, _DISTRIBUTION), (
        _asks(release, found, fits=_failures(release, found) == wrong),
        Statement("source", release.source, release.source, where),
        *(Statement(f"fails_{n}", False, words, f"{_TABLE}: failure") for n, words in enumerate(wrong, 1)),
        *_instead(release),
        *_formats(release, where),
        *(Statement(f"fault_{name}", words, words, where) for name, words in release.faults.items()),
    )


def _failures(release: SpeculatorsRelease, found: Detection) -> tuple[str, ...]:
    return native_verdict(release, found.version, found.capabilities) if found.installed else ()


def _asks(release: SpeculatorsRelease, found: Detection, *, fits: bool) -> Statement:
    where = f"{_TABLE}: {release.version}"
    if not release.vllm:
        return Statement("asks_for", None, "any vLLM: it names none", where)
    if found.version is None:
        return Statement("asks_for", None, f"vLLM {release.vllm}", where)
    text = f"vLLM {release.vllm}: {found.version} {'is' if fits else 'is not'} among these"
    return Statement("asks_for", fits, text, where)


def _instead(release: SpeculatorsRelease) -> Iterator[Statement]:
    """What to run where the release generates states in this process, which it never does without faults."""
    if any(name.startswith("own-") for name in release.faults):
        command = "python -m vllm_compat.speculators run SCRIPT ARGS..."
        text = f"`{command}` runs a script with our generator in its place"
        yield Statement("instead", command, text, "docs/speculators.md")


def _formats(release: SpeculatorsRelease, where: str) -> Iterator[Statement]:
    for name, final in release.formats.items():
        text = f"the final state {final}; read by {release.readers[name]}"
        yield Statement(f"reads_{name}", final, text, where)


def _find(version: str) -> SpeculatorsRelease | None:
    try:
        return find_speculators(Version(version))
    except InvalidVersion:
        return None
