"""Whatever ends a run early leaves whole files only, and a run.json that says so."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import vllm_compat
import vllm_compat.engine
from vllm_compat.errors import (
    InputError,
    RequestError,
    StepError,
    StorageError,
)
from vllm_compat.extract import extract
from vllm_compat.testing import FakeEngine
from vllm_compat.types import StepResult

if TYPE_CHECKING:
    from tests.unit.extract.conftest import (
        MakeConfig,
        MakeEngine,
        Read,
        RunOf,
        SamplesIn,
        SomeRows,
        StatesOf,
        WriteRows,
    )


@pytest.mark.parametrize("step", [0, 1, 3, 7])
def test_an_engine_that_fails(
    config: MakeConfig,
    make_engine: MakeEngine,
    write_rows: WriteRows,
    read: Read,
    states_of: StatesOf,
    caplog: pytest.LogCaptureFixture,
    step: int,
    some_rows: SomeRows,
    run_of: RunOf,
    samples_in: SamplesIn,
) -> None:
    rows = some_rows(12)
    write_rows(rows)
    settings = config()
    with pytest.raises(StepError):
        extract(settings, make_engine(fail_at_step=step, max_num_batched_tokens=16))
    folder = Path(settings.output_dir)
    names = samples_in(folder)
    assert len(names) < 12
    for name in names:
        index = int(name[3:].removesuffix(".safetensors"))
        tensors, _ = read(folder / name)
        assert np.array_equal(tensors["hidden_states"], states_of(rows[index]["input_ids"]))
    assert run_of(folder)["complete"] is False
    assert f"stopped by StepError: {len(names)} of 12 samples are done" in caplog.text
    assert extract(settings, make_engine()).kept == len(names)


class Interrupted(FakeEngine):
    """Ctrl-C in its third step."""

    def run_step(self, meanwhile: Any = None) -> StepResult:
        if self._steps == 3:
            raise KeyboardInterrupt
        return super().run_step(meanwhile)


def test_an_interrupt(
    config: MakeConfig,
    make_engine: MakeEngine,
    write_rows: WriteRows,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    samples_in: SamplesIn,
) -> None:
    write_rows([{"input_ids": [n + 1]} for n in range(12)])
    engine = make_engine(Interrupted, max_num_seqs=1)
    monkeypatch.setattr(vllm_compat.engine, "open_engine", lambda *_, **__: engine)
    settings = config()
    with pytest.raises(KeyboardInterrupt):
        extract(settings)
    assert engine.closed
    assert len(samples_in(Path(settings.output_dir))) == 2, "the states of the third were still on their way"
    assert "stopped by KeyboardInterrupt: 2 of 12 samples" in caplog.text


def test_a_disk_that_fills_up(
    config: MakeConfig,
    make_engine: MakeEngine,
    write_rows: WriteRows,
    read: Read,
    monkeypatch: pytest.MonkeyPatch,
    some_rows: SomeRows,
    run_of: RunOf,
    samples_in: SamplesIn,
) -> None:
    write_rows(some_rows(6))
    settings = config()
    real, left = os.write, [20]

    def write(descriptor: int, data: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    engine = make_engine()
    with pytest.raises(
        StorageError, match=r"cannot be written: No space left on device\. Make room, and run"
    ) as caught:
        extract(settings, engine)
    assert (caught.value.exit_code, caught.value.errno) == (74, 28)
    folder = Path(settings.output_dir)
    names = samples_in(folder)
    assert 0 < len(names) < 6
    for name in names:
        read(folder / name)
    assert run_of(folder)["complete"] is False
    monkeypatch.setattr(os, "write", real)
    assert extract(settings, make_engine()).samples == 6


def test_an_input_that_changes_while_it_is_extracted(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, some_rows: SomeRows, run_of: RunOf
) -> None:
    path = write_rows(some_rows(12))

    class Late(FakeEngine):
        def run_step(self, meanwhile: Any = None) -> StepResult:
            os.utime(path)
            return super().run_step(meanwhile)

    with pytest.raises(InputError, match="changed after it was checked"):
        extract(config(), make_engine(Late))
    assert run_of(Path(config().output_dir))["complete"] is False


def test_a_request_that_the_engine_refuses(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, some_rows: SomeRows
) -> None:
    write_rows(some_rows(3))
    engine = make_engine()
    engine.make_request([1], request_id="sample-1")
    with pytest.raises(RequestError, match="sample-1"):
        extract(config(), engine)


class OutOfMemory(FakeEngine):
    """Its second step wants more than there is, as vLLM says it of a worker."""

    def run_step(self, meanwhile: Any = None) -> StepResult:
        if self._steps == 1:
            self.close()
            raise StepError("a step failed inside vLLM") from RuntimeError("Worker failed: CUDA out of memory. Tried")
        return super().run_step(meanwhile)


def test_a_device_without_memory_gets_advice(
    config: MakeConfig,
    make_engine: MakeEngine,
    write_rows: WriteRows,
    some_rows: SomeRows,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write_rows(some_rows(6))
    with pytest.raises(StepError) as caught:
        extract(config(), make_engine(OutOfMemory))
    assert caught.value.exit_code == 75
    assert "lower --batch-size, --max-num-batched-tokens or --gpu-memory-utilization" in caplog.text
    assert extract(config(batch_size=1), make_engine()).samples == 6
