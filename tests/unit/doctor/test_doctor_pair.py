"""The installed pair, by the real table of speculators' releases."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.doctor.tree import find, said, write_tree

from vllm_compat import detect
from vllm_compat._detect.speculators import load_speculators
from vllm_compat.detection import Detection
from vllm_compat.doctor.pair import judge_pair

IN_PROCESS = "its own engine loop in this process (VllmHiddenStatesGenerator)"


@pytest.mark.parametrize(
    ("vllm", "fits"),
    [("0.12.0", True), ("0.16.0", True), ("0.16.0+cpu", True), ("0.16.0.post2", True), ("0.13.0rc2", True),
     ("0.11.2", False), ("0.17.0", False)],
)  # fmt: skip
def test_which_vllm_it_asks_for(vllm: str, fits: bool, tmp_path: Path) -> None:
    _, statements = judge_pair(detect(write_tree(tmp_path, version=vllm)), "0.4.0")
    asks = find(statements, "asks_for")
    assert asks.value is fits
    assert asks.text == f"vLLM <=0.16.0,>=0.12.0: {vllm} {'is' if fits else 'is not'} among these"
    assert not any("it asks for vLLM" in s.text for s in statements)


def test_the_release_that_wants_the_final_state_after_the_norm(tmp_path: Path) -> None:
    decision, statements = judge_pair(detect(write_tree(tmp_path, version="0.32.0")), "0.3.0")
    assert find(statements, "source").value == IN_PROCESS
    reads = find(statements, "reads_speculators-v1")
    assert reads.value == "post-norm"
    assert reads.text == "the final state post-norm; read by speculators.train.data.Eagle3SampleFileDataset"
    failures = [s for s in statements if s.name.startswith("fails_")]
    assert len(failures) > 3
    assert any("sample_tokens" in s.text for s in failures)
    assert find(statements, "instead").value == "python -m vllm_compat.speculators run SCRIPT ARGS..."
    assert decision.value == "0.3.0"
    assert decision.text.endswith(f"generating states by itself, it would fail here in {len(failures)} way(s)")


def test_a_release_that_leaves_the_work_to_vllm(tmp_path: Path) -> None:
    with_it = {"v1/spec_decode/extract_hidden_states": ""}
    decision, statements = judge_pair(detect(write_tree(tmp_path / "a", add=with_it)), "0.9.0")
    assert find(statements, "asks_for").text == "any vLLM: it names none"
    assert said(statements)["reads_speculators"] == "pre-norm"
    assert not any(s.name.startswith("fails_") or s.name == "instead" for s in statements)
    assert "it would fail" not in decision.text
    _, statements = judge_pair(detect(write_tree(tmp_path / "b")), "0.9.0")
    assert "this vLLM serves none" in find(statements, "fails_1").text


def test_what_a_release_gets_wrong_by_itself_is_said(tmp_path: Path) -> None:
    _, statements = judge_pair(detect(write_tree(tmp_path)), "0.9.0")
    assert "without its scales" in find(statements, "fault_fp8-unscaled").text


def test_without_speculators(tmp_path: Path) -> None:
    decision, statements = judge_pair(detect(write_tree(tmp_path)), None)
    assert (decision.value, decision.text) == (None, "not installed, and extracting needs none")
    assert statements == ()


@pytest.mark.parametrize("version", ["0.1.0", "0.9.0.dev3", "one of mine"])
def test_a_speculators_that_nobody_has_looked_at(version: str, tmp_path: Path) -> None:
    decision, statements = judge_pair(detect(write_tree(tmp_path)), version)
    assert (decision.value, decision.text) == (None, f"{version} is installed; nothing is known of it here")
    assert statements == ()


@pytest.mark.parametrize("version", [r.version for r in load_speculators()])
def test_every_release_has_a_verdict_with_and_without_a_vllm(version: str, tmp_path: Path) -> None:
    for found in (Detection(None), detect(write_tree(tmp_path, version="dev"))):
        _, statements = judge_pair(found, version)
        assert find(statements, "asks_for").value is None
        assert any(s.name.startswith("reads_") for s in statements)
        assert all(s.text and s.evidence for s in statements)
