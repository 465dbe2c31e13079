"""What only the fake engine has: its rows, its options. What it shares with the real one is in test_engine_contract."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from vllm_compat import EngineClosedError, StepError, UsageError
from vllm_compat.testing import FakeEngine, fake_row
from vllm_compat.types import LayerId


def test_a_row_is_the_same_for_the_same_layer_and_tokens() -> None:
    assert fake_row(0, [1, 2], 8) == fake_row(0, (1, 2), 8)
    assert len(fake_row(0, [1, 2], 8)) == 8
    assert fake_row(0, [1, 2], 8)[:4] == fake_row(0, [1, 2], 4)


def test_a_row_differs_with_the_layer_the_tokens_and_their_order() -> None:
    cases: list[tuple[LayerId, list[int]]] = [
        (0, [1, 2]), (1, [1, 2]), ("norm", [1, 2]), (0, [2, 1]), (0, [2]), (0, [1, 2, 2]), (0, [12]),
    ]  # fmt: skip
    assert len({tuple(fake_row(layer, tokens, 8)) for layer, tokens in cases}) == len(cases)


def test_values_are_exact_in_bfloat16() -> None:
    values = {v for n in range(200) for v in fake_row(n, [n], 32)}
    assert len(values) > 200
    assert all(-1 <= v < 1 and v * 128 == int(v * 128) for v in values)
    # bfloat16 is the upper half of float32.
    assert all(struct.pack(">f", v)[2:] == b"\0\0" for v in values)


def test_layer_ids_are_checked_against_the_model() -> None:
    assert FakeEngine((3, "norm", 0), num_layers=4).layer_ids == (3, "norm", 0)
    with pytest.raises(UsageError, match="layer id 4 is out of range"):
        FakeEngine((4,), num_layers=4)


def test_rows_are_lists_or_what_the_factory_makes_of_them() -> None:
    def states(**options: Any) -> Any:
        engine = FakeEngine((0,), hidden_size=3, **options)
        engine.make_request([1, 2])
        engine.run_step()
        return engine.get_captured_states()[0][0]

    assert states() == [fake_row(0, [1], 3), fake_row(0, [1, 2], 3)]
    array = states(make_tensor=np.array)
    assert (array.shape, array.tolist()) == ((2, 3), states())


def test_no_more_requests_are_under_way_than_allowed() -> None:
    engine = FakeEngine(max_num_seqs=2)
    for n in range(5):
        engine.make_request([1], request_id=str(n))
    steps = []
    while engine.has_unfinished:
        steps.append(set(engine.run_step().num_scheduled_tokens))
    assert steps == [{"0", "1"}, {"2", "3"}, {"4"}]


def test_no_step_has_more_tokens_than_allowed_and_earlier_requests_go_first() -> None:
    engine = FakeEngine(max_num_batched_tokens=5)
    for request_id in "abc":
        engine.make_request([1, 2, 3], request_id=request_id)
    steps = []
    while engine.has_unfinished:
        steps.append(engine.run_step().num_scheduled_tokens)
    assert steps == [{"a": 3, "b": 2}, {"b": 1, "c": 3}]


def test_finished_requests_are_reported_in_an_order_of_their_own() -> None:
    engine = FakeEngine()
    for request_id, length in [("long", 9), ("short", 1), ("middle", 5)]:
        engine.make_request([1] * length, request_id=request_id)
    assert list(engine.run_step().finished) == ["short", "middle", "long"]
    assert [s.request_id for s in engine.get_captured_states()] == ["long", "short", "middle"]


@pytest.mark.parametrize("number", [0, 2])
def test_it_fails_in_the_step_it_was_told_to(number: int) -> None:
    engine = FakeEngine(fail_at_step=number)
    engine.run_step()  # an idle one does not count
    for _ in range(number):
        engine.make_request([1])
        engine.run_step()
    engine.make_request([1])
    with pytest.raises(StepError, match="told to fail"):
        engine.run_step()
    assert engine.closed
    with pytest.raises(EngineClosedError):
        engine.get_captured_states()


def test_without_waiting_no_states_come_in_the_step_that_ends_them() -> None:
    """However often a caller asks: one that does not wait at the end loses them, and its tests shall notice."""
    engine = FakeEngine()
    engine.make_request([1], request_id="a")
    engine.run_step()
    for _ in range(3):
        assert engine.get_captured_states(wait=False) == []
        engine.run_step()
    engine.make_request([1], request_id="b")
    engine.run_step()
    assert [s.request_id for s in engine.get_captured_states(wait=False)] == ["a"]
    assert [s.request_id for s in engine.get_captured_states()] == ["b"]
