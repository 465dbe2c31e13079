"""Whole runs over inputs of every kind: they end, go on, and are verified against the same input."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.unit.extract.input_files import WRITERS, Row

from vllm_compat.errors import InputError, RunMismatchError, StepError
from vllm_compat.extract import extract
from vllm_compat.verify.config import VerifyConfig
from vllm_compat.verify.prove import verify

if TYPE_CHECKING:
    from tests.unit.extract.conftest import MakeConfig, MakeEngine, RunOf, SamplesIn

ROWS: list[Row] = [{"input_ids": [n + 1] * (n + 1), "loss_mask": [n % 2] * (n + 1), "id": f"row {n}"} for n in range(5)]


@pytest.mark.parametrize("kind", WRITERS)
def test_a_run_over_any_kind_goes_on_and_is_verified(
    config: MakeConfig, make_engine: MakeEngine, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    WRITERS[kind](tmp_path / "input", ROWS)
    asked = config(prepared_data=tmp_path / "input", save_dtype="auto", batch_size=1, max_seq_len=4)
    with pytest.raises(StepError):
        extract(asked, make_engine(fail_at_step=3, max_num_seqs=1))
    with monkeypatch.context() as patch:
        patch.setattr("vllm_compat.extract.plan.check_input", None)  # what is untouched is not read through again
        assert extract(asked, make_engine()).complete
    verdict = verify(VerifyConfig(tmp_path / "out"))
    assert (verdict.num_problems, verdict.input_why_not, verdict.scan.good) == (0, "", 5), verdict.first
    WRITERS[kind](tmp_path / "other", [*ROWS[:4], {**ROWS[4], "loss_mask": [1, 1, 1, 1, 1]}])
    wrong = verify(VerifyConfig(tmp_path / "out", prepared_data=tmp_path / "other"))
    assert [problem.index for problem in wrong.first if problem.index is not None] == [4]


def test_samples_that_are_too_long_are_left_out_and_named(
    config: MakeConfig, make_engine: MakeEngine, tmp_path: Path, run_of: RunOf, samples_in: SamplesIn
) -> None:
    WRITERS["plain"](tmp_path / "data.jsonl", ROWS)
    folder = tmp_path / "out"
    with pytest.raises(StepError):
        extract(config(overlong="skip", max_seq_len=3, batch_size=1), make_engine(fail_at_step=2, max_num_seqs=1))
    with pytest.raises(RunMismatchError) as caught:
        extract(config(max_seq_len=3))
    assert caught.value.fields == ("overlong",)
    summary = extract(config(overlong="skip", max_seq_len=3), make_engine())
    assert (summary.samples, summary.skipped, summary.overlong, summary.truncated) == (5, 2, 2, 0)
    assert summary.tokens == 1 + 2 + 3
    assert samples_in(folder) == [f"hs_{n}.safetensors" for n in range(3)]
    assert run_of(folder)["skipped"] == [
        {"index": 3, "why": "4 tokens, and the limit is 3"},
        {"index": 4, "why": "5 tokens, and the limit is 3"},
    ]
    verdict = verify(VerifyConfig(folder))
    assert verdict.scan.skipped == 2
    assert not [p for p in verdict.first if "states are float32" not in p.what]


def test_no_engine_is_opened_for_samples_that_are_all_left_out(
    config: MakeConfig, make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model may take twenty minutes to load."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("an engine is opened")

    monkeypatch.setattr("vllm_compat.engine.open_engine", never)
    asked = config(overlong="skip", max_seq_len=3)
    WRITERS["plain"](tmp_path / "data.jsonl", ROWS[3:])
    assert extract(asked).skipped == 2
    WRITERS["plain"](tmp_path / "long-first.jsonl", ROWS[::-1])
    asked = config(
        overlong="skip", max_seq_len=3, prepared_data=tmp_path / "long-first.jsonl", output_dir=tmp_path / "o"
    )
    with pytest.raises(AssertionError, match="an engine is opened"):
        extract(asked)
    summary = extract(asked, make_engine())
    assert (summary.samples, summary.skipped, summary.kept) == (5, 2, 2)
    assert verify(VerifyConfig(tmp_path / "o")).scan.skipped == 2


def test_samples_that_are_too_long_are_all_refused(config: MakeConfig, tmp_path: Path) -> None:
    WRITERS["plain"](tmp_path / "data.jsonl", ROWS)
    with pytest.raises(InputError) as caught:
        extract(config(overlong="fail", max_seq_len=3))
    assert [str(p) for p in caught.value.problems] == [
        f"line {n}: {n} tokens, and the limit is 3; --overlong truncate cuts such samples, and --overlong skip leaves "
        "them out"
        for n in (4, 5)
    ]
