"""A whole extraction over the fake engine: what is written, what is refused, and what a failure leaves behind."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest

import vllm_compat
import vllm_compat.engine
from vllm_compat.errors import (
    CaptureError,
    InputError,
    RequestError,
    StepError,
    UsageError,
    VllmCompatError,
)
from vllm_compat.extract import extract
from vllm_compat.testing import FakeEngine
from vllm_compat.types import CapturedStates, StepResult

if TYPE_CHECKING:
    from tests.unit.extract.conftest import MakeConfig, MakeEngine, Read, StatesOf, WriteRows

Row = dict[str, Any]


def some_rows(count: int, seed: int = 0) -> list[Row]:
    rng = random.Random(seed)
    return [{"input_ids": [rng.randrange(1000) for _ in range(rng.randrange(1, 40))], "id": n} for n in range(count)]


def run_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return found


def samples_in(folder: Path) -> list[str]:
    assert not list(folder.glob(".*")), "a temporary file was left behind"
    return sorted(path.name for path in folder.glob("hs_*"))


def test_every_file_is_its_samples(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, read: Read, states_of: StatesOf
) -> None:
    rows = some_rows(9)
    rows[4]["loss_mask"] = [n % 2 for n in range(len(rows[4]["input_ids"]))]
    del rows[5]["id"]
    write_rows(rows)
    settings = config()
    summary = extract(settings, make_engine(max_num_batched_tokens=17, max_num_seqs=3))

    folder = Path(settings.output_dir)
    assert samples_in(folder) == sorted(f"hs_{n}.safetensors" for n in range(9))
    for index, row in enumerate(rows):
        tensors, metadata = read(folder / f"hs_{index}.safetensors")
        assert tensors["token_ids"].tolist() == row["input_ids"]
        assert np.array_equal(tensors["hidden_states"], states_of(row["input_ids"]))
        assert tensors.keys() == {"token_ids", "hidden_states"} | ({"loss_mask"} & row.keys())
        assert metadata == {
            "layer_ids": '[2, 0, "norm"]',
            "layer_id_convention": "k = residual stream leaving decoder layer k, 0-based, before the final norm; "
            "norm = after it",
            "index": str(index),
            "request_id": f"sample-{index}",
            "model": settings.model,
            "vllm_version": metadata["vllm_version"],
            "vllm_compat_version": vllm_compat.__version__,
        } | ({"sample_id": str(row["id"])} if "id" in row else {})
    assert read(folder / "hs_4.safetensors")[0]["loss_mask"].tolist() == rows[4]["loss_mask"]

    assert summary.samples == 9
    assert summary.tokens == sum(len(row["input_ids"]) for row in rows)
    assert summary.bytes == sum(path.stat().st_size for path in folder.glob("hs_*"))
    assert summary.output_dir == str(folder)
    assert summary.tokens_per_second == pytest.approx(summary.tokens / summary.seconds)
    run = run_of(folder)
    assert run["complete"] is True
    assert run["summary"] == dataclasses.asdict(summary)
    assert run["samples"] == 9
    assert run["input_file"] == "data.jsonl"
    assert run["config"]["batch_size"] == 2
    assert run["layer_ids"] == [2, 0, "norm"]


def test_long_samples_are_cut_and_counted(
    config: MakeConfig,
    make_engine: MakeEngine,
    write_rows: WriteRows,
    read: Read,
    states_of: StatesOf,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "vllm_compat")
    write_rows([{"input_ids": [*range(1, 11)], "loss_mask": [0] * 7 + [1] * 3}, {"input_ids": [*range(8)]}])
    settings = config(max_seq_len=8)
    assert extract(settings, make_engine()).truncated == 1
    tensors, _ = read(Path(settings.output_dir) / "hs_0.safetensors")
    assert tensors["token_ids"].tolist() == [*range(1, 9)]
    assert tensors["loss_mask"].tolist() == [0] * 7 + [1]
    assert np.array_equal(tensors["hidden_states"], states_of([*range(1, 9)]))
    start, *_, end = caplog.messages
    bytes_per_token = 3 * 8 * 2  # layers, width, bfloat16
    assert start.startswith(f"2 samples, 16 tokens, about 0.000 GB ({bytes_per_token} bytes a token)")
    assert "1 of the samples are cut at 8 tokens" in start
    assert "all 2 samples are written" in end
    assert "1 samples cut" in end


def test_the_engine_is_opened_as_asked_and_closed(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(some_rows(3))
    opened: list[tuple[str, dict[str, Any]]] = []
    engine = make_engine(layer_ids=(2, 4, 5, 7))

    def open_engine(model: str, **options: Any) -> FakeEngine:
        assert run_of(Path(settings.output_dir))["complete"] is False, "run.json is there before the model loads"
        opened.append((model, options))
        return engine

    monkeypatch.setattr(vllm_compat.engine, "open_engine", open_engine)
    settings = config(layer_ids=None, tensor_parallel_size=8, gpu_memory_utilization=0.8, engine_options={"seed": 1})
    extract(settings)
    assert opened == [
        (
            settings.model,
            {
                "layer_ids": (2, 4, 5, 7),
                "tensor_parallel_size": 8,
                "max_model_len": 65,
                "max_num_seqs": 2,
                "gpu_memory_utilization": 0.8,
                "dtype": "auto",
                "seed": 1,
            },
        )
    ]
    assert engine.closed


@pytest.mark.parametrize(("positions", "limit"), [(32, 31), (64, 63), (65, 64), (4096, 64)])
def test_the_models_positions_bound_a_sample(
    config: MakeConfig,
    make_engine: MakeEngine,
    model: Path,
    write_rows: WriteRows,
    read: Read,
    caplog: pytest.LogCaptureFixture,
    positions: int,
    limit: int,
) -> None:
    (model / "config.json").write_text(json.dumps({"num_hidden_layers": 8, "max_position_embeddings": positions}))
    write_rows([{"input_ids": [1] * 64}])
    settings = config()
    summary = extract(settings, make_engine(max_model_len=limit + 1))
    assert summary.truncated == (limit < 64)
    tensors, _ = read(Path(settings.output_dir) / "hs_0.safetensors")
    assert len(tensors["token_ids"]) == limit
    warned = any(f"samples are cut at {limit} tokens, not at 64" in message for message in caplog.messages)
    assert warned == (limit < 64)


def test_a_callers_engine_is_left_open_and_its_layers_are_the_default(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, read: Read
) -> None:
    write_rows(some_rows(2))
    engine = make_engine(layer_ids=(6, 1))
    settings = config(layer_ids=None)
    extract(settings, engine)
    assert not engine.closed
    assert read(Path(settings.output_dir) / "hs_0.safetensors")[1]["layer_ids"] == "[6, 1]"
    with pytest.raises(UsageError, match="captures the layers"):
        extract(config(output_dir=Path(settings.output_dir) / "2", layer_ids=(1, 6)), engine)


def test_num_samples(config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows) -> None:
    write_rows(some_rows(5))
    settings = config(num_samples=3)
    assert extract(settings, make_engine()).samples == 3
    assert len(samples_in(Path(settings.output_dir))) == 3


def test_fewer_samples_than_asked_for_are_warned_of(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, caplog: pytest.LogCaptureFixture
) -> None:
    write_rows(some_rows(2))
    assert extract(config(num_samples=3), make_engine()).samples == 2
    assert "3 samples were asked for, the file has 2" in caplog.text


def test_too_little_space_is_warned_of(
    config: MakeConfig,
    make_engine: MakeEngine,
    write_rows: WriteRows,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Usage(NamedTuple):
        free: int

    write_rows([{"input_ids": [1, 2]}])
    for free in (2 * 48, 2 * 48 - 1):
        caplog.clear()
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: Usage(free))
        extract(config(output_dir=Path(config().output_dir) / str(free)), make_engine())
        assert ("GB free" in caplog.text) == (free < 96)


class Watched(FakeEngine):
    """Notes how many requests wait in each step, and how many it was given by then."""

    seen: list[tuple[int, int]]

    def run_step(self) -> StepResult:
        self.seen.append((len(self._queue), self._given))
        return super().run_step()

    _given = 0

    def make_request(self, *args: Any, **options: Any) -> Any:
        self._given += 1
        return super().make_request(*args, **options)


def test_the_queue_is_kept_filled_and_never_overfilled(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows
) -> None:
    write_rows([{"input_ids": [7] * (1 + n % 13)} for n in range(40)])
    engine = make_engine(Watched, max_num_seqs=3, max_num_batched_tokens=8)
    assert isinstance(engine, Watched)
    engine.seen = []
    extract(config(batch_size=3), engine)
    assert all(waiting == 6 for waiting, given in engine.seen if given < 40), "no barrier between batches"
    assert max(waiting for waiting, _ in engine.seen) == 6
    assert engine.seen[-1][1] == 40


# Everything that can be refused, is refused before the model loads.


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_engine(*_: object, **__: object) -> FakeEngine:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(vllm_compat.engine, "open_engine", open_engine)


@pytest.mark.usefixtures("no_engine")
def test_a_bad_input_is_refused_first(config: MakeConfig, write_rows: WriteRows) -> None:
    write_rows([{"input_ids": [1]}, {"input_ids": [1000]}, {"input_ids": []}])
    with pytest.raises(InputError) as caught:
        extract(config())
    assert [p.line for p in caught.value.problems] == [2, 3]


@pytest.mark.usefixtures("no_engine")
def test_a_layer_that_is_not_there_is_refused_first(config: MakeConfig, write_rows: WriteRows) -> None:
    write_rows(some_rows(1))
    with pytest.raises(UsageError, match="layer id 8 is out of range"):
        extract(config(layer_ids=(8,)))


@pytest.mark.usefixtures("no_engine")
def test_samples_of_an_earlier_run_are_refused_first(config: MakeConfig, write_rows: WriteRows) -> None:
    write_rows(some_rows(1))
    old = Path(config().output_dir) / "hs_77.safetensors"
    old.parent.mkdir()
    old.write_bytes(b"old")
    with pytest.raises(UsageError, match=r"hs_77\.safetensors.*another output folder, or move"):
        extract(config())
    assert old.read_bytes() == b"old"
    assert not (old.parent / "run.json").exists()


@pytest.mark.usefixtures("no_engine")
def test_an_output_that_is_a_file_is_refused_first(config: MakeConfig, write_rows: WriteRows) -> None:
    path = write_rows(some_rows(1))
    with pytest.raises(UsageError, match="cannot be used"):
        extract(config(output_dir=path))
    with pytest.raises(UsageError, match="cannot be used"):
        extract(config(output_dir=path / "below"))


def test_a_failed_run_without_samples_can_be_repeated(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows
) -> None:
    write_rows(some_rows(3))
    with pytest.raises(StepError):
        extract(config(), make_engine(fail_at_step=0))
    assert extract(config(), make_engine()).samples == 3


def test_what_only_the_engine_knows_is_checked_before_its_first_step(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, model: Path
) -> None:
    (model / "config.json").write_text("{}")
    write_rows([{"input_ids": [1] * 9}, {"input_ids": [1, 500]}])
    with pytest.raises(InputError, match="line 2: input_ids has 500") as caught:
        extract(config(), make_engine(vocab_size=500, fail_at_step=0))
    assert [p.line for p in caught.value.problems] == [2]
    with pytest.raises(UsageError, match="Lower max_seq_len to 8"):
        extract(config(), make_engine(max_model_len=9, fail_at_step=0))
    with pytest.raises(UsageError, match="layer id 2 is out of range"):
        extract(config(), make_engine(layer_ids=(0,), num_layers=2, fail_at_step=0))
    assert extract(config(), make_engine(vocab_size=501, max_model_len=10)).samples == 2


# States that are not the sample's.

Change = Callable[[list[CapturedStates]], list[CapturedStates]]


class Tampering(FakeEngine):
    """Changes the states before they are handed out."""

    change: Change

    def get_captured_states(self) -> list[CapturedStates]:
        return self.change(super().get_captured_states())


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
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, change: Change, words: str
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
    assert not engine.has_unfinished


class Forgetful(FakeEngine):
    """Drops a request without a word."""

    def run_step(self) -> StepResult:
        self.abort("sample-1")
        return super().run_step()


def test_a_request_that_vanishes(config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows) -> None:
    write_rows(some_rows(3))
    with pytest.raises(CaptureError, match=r"sample-1 of line 2 \(reason: not given\)"):
        extract(config(), make_engine(Forgetful))


def test_another_run_in_the_same_folder(config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows) -> None:
    write_rows(some_rows(4))
    folder = Path(config().output_dir)

    class Other(FakeEngine):
        name = "hs_1.safetensors"

        def run_step(self) -> StepResult:
            (folder / self.name).write_bytes(b"other")
            return super().run_step()

    with pytest.raises(CaptureError, match="is already there"):
        extract(config(), make_engine(Other))
    assert (folder / "hs_1.safetensors").read_bytes() == b"other"
    shutil.rmtree(folder)
    Other.name = "hs_4.safetensors"
    with pytest.raises(CaptureError, match="5 files for 4 samples"):
        extract(config(), make_engine(Other))
    assert run_of(folder)["complete"] is False


# Failures leave whole files only.


@pytest.mark.parametrize("step", [0, 1, 3, 7])
def test_an_engine_that_fails(
    config: MakeConfig,
    make_engine: MakeEngine,
    write_rows: WriteRows,
    read: Read,
    states_of: StatesOf,
    caplog: pytest.LogCaptureFixture,
    step: int,
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
    assert f"stopped by StepError: {len(names)} of 12 samples are written" in caplog.text


class Interrupted(FakeEngine):
    """Ctrl-C in its third step."""

    def run_step(self) -> StepResult:
        if self._steps == 3:
            raise KeyboardInterrupt
        return super().run_step()


def test_an_interrupt(
    config: MakeConfig,
    make_engine: MakeEngine,
    write_rows: WriteRows,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write_rows([{"input_ids": [n + 1]} for n in range(12)])
    engine = make_engine(Interrupted, max_num_seqs=1)
    monkeypatch.setattr(vllm_compat.engine, "open_engine", lambda *_, **__: engine)
    settings = config()
    with pytest.raises(KeyboardInterrupt):
        extract(settings)
    assert engine.closed
    assert len(samples_in(Path(settings.output_dir))) == 3
    assert "stopped by KeyboardInterrupt: 3 of 12 samples" in caplog.text


def test_a_disk_that_fills_up(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, read: Read, monkeypatch: pytest.MonkeyPatch
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
    with pytest.raises(VllmCompatError, match=r"hs_\d\.safetensors cannot be written: No space left") as caught:
        extract(settings, engine)
    assert caught.value.exit_code == 1
    folder = Path(settings.output_dir)
    names = samples_in(folder)
    assert 0 < len(names) < 6
    for name in names:
        read(folder / name)
    assert run_of(folder)["complete"] is False
    assert not engine.has_unfinished, "a caller's engine is not left with this run's requests"


def test_an_input_that_changes_while_it_is_extracted(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows
) -> None:
    path = write_rows(some_rows(12))

    class Late(FakeEngine):
        def run_step(self) -> StepResult:
            os.utime(path)
            return super().run_step()

    with pytest.raises(InputError, match="changed after it was checked"):
        extract(config(), make_engine(Late))
    assert run_of(Path(config().output_dir))["complete"] is False


def test_a_request_that_the_engine_refuses(config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows) -> None:
    write_rows(some_rows(3))
    engine = make_engine()
    engine.make_request([1], request_id="sample-1")
    with pytest.raises(RequestError, match="sample-1"):
        extract(config(), engine)


def test_progress_is_told_of_every_file_and_closed(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows
) -> None:
    class Count:
        def __init__(self, total: int) -> None:
            self.total, self.tokens, self.sizes, self.closed = total, 0, 0, 0
            made.append(self)

        def advance(self, tokens: int, size: int) -> None:
            self.tokens, self.sizes = self.tokens + tokens, self.sizes + size

        def close(self) -> None:
            self.closed += 1

    made: list[Count] = []
    write_rows(some_rows(4))
    summary = extract(config(), make_engine(), Count)
    [count] = made
    assert (count.total, count.tokens, count.sizes, count.closed) == (4, summary.tokens, summary.bytes, 1)
