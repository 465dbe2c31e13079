"""States that are not the sample's, are not written and end the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from vllm_compat.errors import (
    CaptureError,
)
from vllm_compat.extract import extract
from vllm_compat.testing import FakeEngine
from vllm_compat.types import CapturedStates, StepResult

if TYPE_CHECKING:
    from tests.unit.extract.conftest import (
        MakeConfig,
        MakeEngine,
        RunOf,
        SamplesIn,
        SomeRows,
        WriteRows,
    )

Change = Callable[[list[CapturedStates]], list[CapturedStates]]


class Tampering(FakeEngine):
    """Changes the states before they are handed out."""

    change: Change

    def get_captured_states(self, *, wait: bool = True) -> list[CapturedStates]:
        return self.change(super().get_captured_states(wait=wait))


def _one(**values: Any) -> Change:
    def change(states: list[CapturedStates]) -> list[CapturedStates]:
        return [dataclasses.replace(s, **values) if s.request_id == "sample-2" else s for s in states]

    return change


def _each(make: Callable[[CapturedStates], CapturedStates]) -> Change:
    return lambda states: [make(s) if s.request_id == "sample-2" else s for s in states]


def _with_nan(states: CapturedStates) -> CapturedStates:
    states.hidden_states[1][-1, 3] = np.nan
    return states


def _swapped(states: list[CapturedStates]) -> list[CapturedStates]:
    ids = [s.request_id for s in reversed(states)]
    return [dataclasses.replace(s, request_id=i) for s, i in zip(states, ids, strict=True)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_swapped, "the states are of other tokens"),
        (_one(token_ids=(1, 2)), r"sample 2 \(line 3\): the states are of other tokens"),
        (_one(token_ids=(3, 3, 4)), "3 where the sample has 3, different from position 2 on"),
        (_one(token_ids=(3, 3, 3, 3)), "4 where the sample has 3, different from position 3 on"),
        (_one(request_id="sample-99"), "states came for 'sample-99'"),
        (_one(request_id="sample-0"), "states came for 'sample-0'|other tokens"),
        (_one(layer_ids=(0, 2, "norm")), "states of the layers"),
        (_each(lambda s: dataclasses.replace(s, hidden_states=s.hidden_states[:2])), "the shapes"),
        (_each(lambda s: dataclasses.replace(s, hidden_states=tuple(h[:, :7] for h in s.hidden_states))), "the shapes"),
        (_each(lambda s: dataclasses.replace(s, hidden_states=tuple(h[:2] for h in s.hidden_states))), "the shapes"),
        (_each(_with_nan), r"sample 2 \(line 3\): layer id 0: the state of token 2 is not finite"),
        (lambda states: [s for s in states if s.request_id != "sample-2"], "ended without states, first sample-2"),
        (lambda states: [t for s in states for t in (s, s)], "states came for"),
    ],
)
def test_states_that_cannot_be_vouched_for(
    config: MakeConfig,
    make_engine: MakeEngine,
    write_rows: WriteRows,
    change: Change,
    words: str,
    run_of: RunOf,
    samples_in: SamplesIn,
) -> None:
    write_rows([{"input_ids": [n + 1] * (1 + n)} for n in range(5)])
    engine = make_engine(Tampering)
    assert isinstance(engine, Tampering)
    engine.change = change
    settings = config(batch_size=5)
    with pytest.raises(CaptureError, match=words) as caught:
        extract(settings, engine)
    assert caught.value.exit_code == 5
    folder = Path(settings.output_dir)
    assert run_of(folder)["complete"] is False
    if change is not _swapped:
        assert "hs_2.safetensors" not in samples_in(folder)


def test_missing_states_are_noticed_at_once(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, samples_in: SamplesIn
) -> None:
    write_rows([{"input_ids": [n + 1]} for n in range(12)])
    engine = make_engine(Tampering, max_num_seqs=1)
    assert isinstance(engine, Tampering)
    engine.change = lambda states: [s for s in states if s.request_id != "sample-2"]
    with pytest.raises(CaptureError, match=r"sample-2 of line 3 \(reason: length\)"):
        extract(config(), engine)
    assert samples_in(Path(config().output_dir)) == ["hs_0.safetensors", "hs_1.safetensors"]
    assert not engine.closed
    assert not engine.has_unfinished, "a caller's engine is not left with this run's requests"


class Forgetful(FakeEngine):
    """Drops a request without a word."""

    def run_step(self, meanwhile: Any = None) -> StepResult:
        self.abort("sample-1")
        return super().run_step(meanwhile)


@pytest.mark.timeout(60)  # the failure is a loop without end
def test_a_request_that_vanishes(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, some_rows: SomeRows
) -> None:
    write_rows(some_rows(3))
    with pytest.raises(CaptureError, match=r"sample-1 of line 2 \(reason: not given\)"):
        extract(config(), make_engine(Forgetful))


def test_another_run_in_the_same_folder(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, some_rows: SomeRows, run_of: RunOf
) -> None:
    write_rows(some_rows(4))
    folder = Path(config().output_dir)

    class Other(FakeEngine):
        def run_step(self, meanwhile: Any = None) -> StepResult:
            (folder / "hs_4.safetensors").write_bytes(b"other")
            return super().run_step(meanwhile)

    with pytest.raises(
        CaptureError, match=r"files that are named like samples and are none of this run: hs_4\.safetensors"
    ):
        extract(config(), make_engine(Other))
    assert run_of(folder)["complete"] is False
    (folder / "hs_4.safetensors").unlink()
    assert extract(config()).kept == 4, "nothing is left to do, and no engine is needed for it"
    assert run_of(folder)["complete"] is True


def test_a_file_that_goes_while_others_are_written(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, some_rows: SomeRows, run_of: RunOf
) -> None:
    write_rows(some_rows(4))
    folder = Path(config().output_dir)

    class Thief(FakeEngine):
        def run_step(self, meanwhile: Any = None) -> StepResult:
            (folder / "hs_0.safetensors").unlink(missing_ok=True)
            return super().run_step(meanwhile)

    with pytest.raises(CaptureError, match="samples were written and are gone: 0"):
        extract(config(batch_size=1, writers=1, max_pending_bytes=1), make_engine(Thief, max_num_seqs=1))
    assert run_of(folder)["complete"] is False
    assert extract(config(), make_engine()).kept == 3
