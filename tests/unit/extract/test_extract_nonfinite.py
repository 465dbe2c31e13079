"""A state that is not finite ends the run, or its sample is left out and named."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from vllm_compat.errors import NonFiniteError
from vllm_compat.extract import extract
from vllm_compat.extract.done import SealedEntries
from vllm_compat.testing import FakeEngine
from vllm_compat.types import CapturedStates

if TYPE_CHECKING:
    from tests.unit.extract.conftest import MakeConfig, MakeEngine, RunOf, SamplesIn, WriteRows

ROWS = [{"input_ids": [n + 1] * (1 + n), "id": f"row {n}"} for n in range(5)]


class Overflowing(FakeEngine):
    """Gives samples 1 and 3 a NaN and an infinity."""

    def get_captured_states(self, *, wait: bool = True) -> list[CapturedStates]:
        found = super().get_captured_states(wait=wait)
        for states in found:
            if states.request_id in ("sample-1", "sample-3"):
                states.hidden_states[1][-1, 3] = np.nan if states.request_id == "sample-1" else np.inf
        return found


def test_it_ends_the_run_and_says_how_to_go_on(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, samples_in: SamplesIn
) -> None:
    write_rows(ROWS)
    with pytest.raises(
        NonFiniteError, match=r"sample 1 .*layer id 0: the state of token 1 is not finite.*skip"
    ) as caught:
        extract(config(batch_size=1, writers=1), make_engine(Overflowing, max_num_seqs=1))
    assert caught.value.exit_code == 5
    assert samples_in(Path(config().output_dir)) == ["hs_0.safetensors"], "and nothing is committed after it"
    assert extract(config(on_nonfinite="skip"), make_engine(Overflowing)).skipped == 2


def test_samples_are_left_out_and_named(
    config: MakeConfig,
    make_engine: MakeEngine,
    write_rows: WriteRows,
    samples_in: SamplesIn,
    run_of: RunOf,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write_rows(ROWS)
    folder = Path(config().output_dir)
    folder.mkdir()
    summary = extract(config(on_nonfinite="skip"), make_engine(Overflowing))
    assert (summary.samples, summary.skipped, summary.complete) == (5, 2, True)
    assert summary.tokens == 1 + 3 + 5
    assert samples_in(folder) == [f"hs_{n}.safetensors" for n in (0, 2, 4)]
    assert "sample 3 is left out, nonfinite: layer id 0: the state of token 3 is not finite" in caplog.text
    run = run_of(folder)
    assert run["complete"] is True
    assert run["summary"]["skipped"] == 2
    assert run["skipped"] == [
        {"index": 1, "why": "nonfinite: layer id 0: the state of token 1 is not finite"},
        {"index": 3, "why": "nonfinite: layer id 0: the state of token 3 is not finite"},
    ]
    entries = [dataclasses.replace(entry, sampled=None) for entry in SealedEntries(folder, 5)]
    assert [entry.index for entry in entries] == [0, 1, 2, 3, 4]
    assert (entries[3].file, entries[3].bytes, entries[3].tokens, entries[3].id) == ("", 0, 4, "row 3")


def test_a_skipped_sample_stays_skipped_and_has_no_file(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, samples_in: SamplesIn
) -> None:
    """A process that was killed may have renamed the file of a sample that is skipped now."""
    write_rows(ROWS)
    folder = Path(config().output_dir)
    with pytest.raises(NonFiniteError):
        extract(config(batch_size=1), make_engine(Overflowing))
    (folder / "hs_3.safetensors").write_bytes(b"never journalled")
    assert extract(config(on_nonfinite="skip"), make_engine(Overflowing)).skipped == 2
    assert samples_in(folder) == [f"hs_{n}.safetensors" for n in (0, 2, 4)]
    again = extract(config(on_nonfinite="fail"))
    assert (again.kept, again.skipped, again.complete) == (5, 2, True)
