"""What a caller can tell about an engine: asked of ``FakeEngine`` and of the real one over recording objects alike."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.recording_engine import HIDDEN_SIZE, MAX_MODEL_LEN, NUM_LAYERS, VOCAB_SIZE, next_token, recorded_engine
from tests.unit.vllm_tree import importing

import vllm_compat
from vllm_compat import CapturedStates, Engine, EngineClosedError, RequestError, StepError, StepResult
from vllm_compat._engine.vllm_engine import VllmEngine
from vllm_compat.testing import FakeEngine, fake_row

Make = Callable[..., Engine]


@pytest.fixture(params=["fake", "real"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Makes an engine; options: layer_ids, budget, failing."""

    def fake(layer_ids: Any = (0,), *, budget: int = 64, failing: bool = False) -> Engine:
        return FakeEngine(
            layer_ids, num_layers=NUM_LAYERS, hidden_size=HIDDEN_SIZE, vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=budget, make_tensor=np.array,
            fail_at_step=0 if failing else None,
        )  # fmt: skip

    def real(layer_ids: Any = (0,), *, budget: int = 64, failing: bool = False) -> Engine:
        engine = recorded_engine(tmp_path, layer_ids, budget=budget)
        engine.executor.failure = RuntimeError("out of memory") if failing else None
        return engine

    with importing(tmp_path):
        yield {"fake": fake, "real": real}[request.param]


def drain(engine: Engine) -> list[CapturedStates]:
    states = []
    while engine.has_unfinished:
        engine.run_step()
        states += engine.get_captured_states()
    return states


def answer(prompt: list[int], count: int) -> list[int]:
    """The tokens sampled after ``prompt``."""
    made = list(prompt)
    for _ in range(count):
        made.append(next_token(made))
    return made[len(prompt) :]


def ending_after(count: int) -> list[int]:
    """A prompt whose answer ends by itself, with token 0, at its ``count``-th token."""
    starts = ([a, b] for a in range(1, VOCAB_SIZE) for b in range(1, VOCAB_SIZE))
    return next(p for p in starts if [n + 1 for n, t in enumerate(answer(p, count)) if t == 0] == [count])


def test_both_engines_have_the_attributes_of_the_interface_and_no_other(make: Make) -> None:
    engine = make((1, "norm"))
    public = {name: value for name, value in vars(engine).items() if not name.startswith("_")}
    public = {name: value for name, value in public.items() if name not in ("scheduler", "executor")}  # the recorders
    assert public == {
        "layer_ids": (1, "norm"),
        "num_layers": NUM_LAYERS,
        "hidden_size": HIDDEN_SIZE,
        "vocab_size": VOCAB_SIZE,
        "max_model_len": MAX_MODEL_LEN,
    }
    assert set(public) == set(Engine.__annotations__)


@pytest.mark.parametrize("kind", [FakeEngine, VllmEngine])
def test_both_engines_have_the_methods_of_the_interface_and_no_other(kind: type[Engine]) -> None:
    def public(owner: type) -> set[str]:
        return {name for name in vars(owner) if not name.startswith("_")} - set(Engine.__annotations__)

    assert public(kind) == public(Engine) == {
        "make_request", "run_step", "get_captured_states", "abort", "has_unfinished", "close", "closed",
    }  # fmt: skip
    for name in public(Engine):
        ours, theirs = getattr(kind, name), getattr(Engine, name)
        if isinstance(theirs, property):
            assert isinstance(ours, property), name
        else:
            assert inspect.signature(ours).parameters == inspect.signature(theirs).parameters, name


def test_the_functions_of_the_package_are_the_methods(make: Make) -> None:
    engine = make()
    vllm_compat.make_request(engine, [1, 2], request_id="a", max_tokens=2, ignore_eos=True)
    assert vllm_compat.run_step(engine).num_scheduled_tokens == {"a": 2}
    assert vllm_compat.run_step(engine).finished == {"a": "length"}
    assert [s.request_id for s in vllm_compat.get_captured_states(engine)] == ["a"]


def test_an_engine_with_nothing_to_do_is_idle(make: Make) -> None:
    engine = make()
    assert not engine.has_unfinished
    assert engine.run_step() == StepResult()
    assert engine.run_step().idle
    assert engine.get_captured_states() == []


def test_a_prefill_gives_one_row_for_each_token_of_the_prompt(make: Make) -> None:
    engine = make((2, 0, "norm"))
    engine.make_request([5, 6, 7], request_id="a", ignore_eos=True)
    result = engine.run_step()
    assert result == StepResult({"a": 3}, {"a": (next_token([5, 6, 7]),)}, {"a": "length"})
    (states,) = engine.get_captured_states()
    assert (states.request_id, states.token_ids, states.num_prompt_tokens) == ("a", (5, 6, 7), 3)
    assert (states.output_token_ids, states.finish_reason) == ((next_token([5, 6, 7]),), "length")
    assert states.layer_ids == (2, 0, "norm")
    for layer_id in (2, 0, "norm"):
        rows = [fake_row(layer_id, [5, 6, 7][: n + 1], HIDDEN_SIZE) for n in range(3)]
        assert states[layer_id].tolist() == rows
    assert engine.get_captured_states() == []


def test_the_states_of_an_answer_are_those_of_its_tokens_but_the_last(make: Make) -> None:
    engine = make()
    engine.make_request([5, 6], request_id="a", max_tokens=4, ignore_eos=True)
    (states,) = drain(engine)
    outputs = answer([5, 6], 4)
    assert states.output_token_ids == tuple(outputs)
    assert states.token_ids == (5, 6, *outputs[:-1])
    assert states.num_prompt_tokens == 2
    assert states[0].tolist() == [fake_row(0, states.token_ids[: n + 1], HIDDEN_SIZE) for n in range(5)]


def test_states_come_once_in_the_order_the_requests_were_made(make: Make) -> None:
    engine = make()
    for request_id, max_tokens in [("c", 3), ("a", 1), ("d", 3), ("b", 1)]:
        engine.make_request([1, 2, len(request_id)], request_id=request_id, max_tokens=max_tokens, ignore_eos=True)
    assert [s.request_id for s in drain(engine)] == ["a", "b", "c", "d"]
    for request_id, max_tokens in [("c", 3), ("a", 1), ("d", 3), ("b", 1)]:
        engine.make_request([1, 2], request_id=request_id, max_tokens=max_tokens, ignore_eos=True)
    while engine.has_unfinished:
        engine.run_step()
    assert [s.request_id for s in engine.get_captured_states()] == ["c", "a", "d", "b"]


def test_without_waiting_states_come_when_the_next_step_has_run(make: Make) -> None:
    engine = make()
    for request_id, max_tokens in [("c", 2), ("a", 1), ("b", 2), ("d", 3)]:
        engine.make_request([1, 2, max_tokens], request_id=request_id, max_tokens=max_tokens, ignore_eos=True)
    came = []
    while engine.has_unfinished:
        engine.run_step()
        came.append([s.request_id for s in engine.get_captured_states(wait=False)])
        assert engine.get_captured_states(wait=False) == []
    assert came == [[], ["a"], ["c", "b"]]
    with pytest.raises(RequestError, match="the id is in use"):
        engine.make_request([1], request_id="d")
    engine.run_step()  # an idle one changes nothing
    assert vllm_compat.get_captured_states(engine, wait=False) == []
    (states,) = vllm_compat.get_captured_states(engine)
    assert states.request_id == "d"
    assert states[0].tolist() == [fake_row(0, states.token_ids[: n + 1], HIDDEN_SIZE) for n in range(5)]
    assert engine.get_captured_states() == []


def test_what_a_caller_does_beside_a_step_counts_from_the_next_one(make: Make) -> None:
    engine = make()
    engine.make_request([1, 2], request_id="a")
    got: list[str] = []

    def meanwhile() -> None:
        got.extend(states.request_id for states in engine.get_captured_states(wait=False))
        if engine.num_layers and "b" not in made:
            made.add("b")
            engine.make_request([3, 4], request_id="b")

    made: set[str] = set()
    assert set(engine.run_step(meanwhile).num_scheduled_tokens) == {"a"}
    assert got == []
    assert set(engine.run_step(meanwhile).num_scheduled_tokens) == {"b"}
    assert got == ["a"]
    assert engine.run_step(meanwhile).idle
    assert [states.request_id for states in engine.get_captured_states()] == ["b"]


def test_what_a_caller_fails_beside_a_step_leaves_the_step_whole(make: Make) -> None:
    engine = make()
    engine.make_request([1, 2], request_id="a")

    def meanwhile() -> None:
        raise KeyError("of the caller's")

    with pytest.raises(KeyError, match="of the caller's"):
        engine.run_step(meanwhile)
    assert not engine.has_unfinished
    assert [states.request_id for states in engine.get_captured_states()] == ["a"]


def test_states_that_were_not_ready_come_in_the_order_the_requests_were_made(make: Make) -> None:
    engine = make()
    for request_id, max_tokens in [("b", 2), ("a", 1)]:
        engine.make_request([1, 2], request_id=request_id, max_tokens=max_tokens, ignore_eos=True)
    engine.run_step()
    assert engine.get_captured_states(wait=False) == []
    engine.run_step()
    assert [s.request_id for s in engine.get_captured_states()] == ["b", "a"]


def test_aborting_what_has_finished_and_is_not_ready_changes_nothing(make: Make) -> None:
    engine = make()
    engine.make_request([1, 2], request_id="a", ignore_eos=True)
    engine.run_step()
    assert engine.get_captured_states(wait=False) == []
    engine.abort("a")
    assert [s.request_id for s in engine.get_captured_states()] == ["a"]


def test_a_prompt_longer_than_the_budget_is_forwarded_in_pieces(make: Make) -> None:
    engine = make(budget=4)
    prompt = list(range(1, 11))
    engine.make_request(prompt, request_id="a", ignore_eos=True)
    results = [engine.run_step() for _ in range(3)]
    assert [r.num_scheduled_tokens for r in results] == [{"a": 4}, {"a": 4}, {"a": 2}]
    assert [r.sampled_token_ids for r in results] == [{}, {}, {"a": (next_token(prompt),)}]
    assert [r.finished for r in results] == [{}, {}, {"a": "length"}]
    assert not engine.has_unfinished
    (states,) = engine.get_captured_states()
    assert states[0].tolist() == [fake_row(0, prompt[: n + 1], HIDDEN_SIZE) for n in range(10)]


def test_an_answer_ends_with_the_model_s_own_end(make: Make) -> None:
    prompt = ending_after(2)
    engine = make()
    engine.make_request(prompt, max_tokens=5)
    engine.make_request(prompt, max_tokens=5, ignore_eos=True)
    engine.make_request(prompt, max_tokens=5, sampling={"stop_token_ids": [answer(prompt, 1)[0]]})
    engine.make_request(prompt, max_tokens=5, sampling={"stop_token_ids": [answer(prompt, 1)[0]]}, ignore_eos=True)
    engine.make_request(prompt, max_tokens=5, sampling={"stop_token_ids": None})
    states = sorted(drain(engine), key=lambda s: s.request_id)
    assert [(len(s.output_token_ids), s.finish_reason) for s in states] == [
        (2, "stop"), (5, "length"), (1, "stop"), (1, "stop"), (2, "stop"),
    ]  # fmt: skip


def test_an_answer_ends_where_the_model_has_no_more_places(make: Make) -> None:
    engine = make()
    engine.make_request([1] * (MAX_MODEL_LEN - 2), max_tokens=9, ignore_eos=True)
    (states,) = drain(engine)
    assert (len(states.output_token_ids), len(states.token_ids), states.finish_reason) == (
        2,
        MAX_MODEL_LEN - 1,
        "length",
    )


def test_without_layers_there_are_outputs_and_no_states(make: Make) -> None:
    engine = make(())
    engine.make_request([1, 2], request_id="a", ignore_eos=True)
    (states,) = drain(engine)
    assert (states.hidden_states, states.layer_ids, states.token_ids) == ((), (), (1, 2))


def test_a_prompt_may_be_an_array(make: Make) -> None:
    engine = make()
    engine.make_request(np.array([5, 6, 7]), request_id="a", ignore_eos=True)  # type: ignore[arg-type]
    (states,) = drain(engine)
    assert [type(t) for t in states.token_ids] == [int, int, int]
    assert states.output_token_ids == (next_token([5, 6, 7]),)
    assert states[0].tolist() == [fake_row(0, [5, 6, 7][: n + 1], HIDDEN_SIZE) for n in range(3)]


def test_what_is_returned_is_the_request_and_need_not_be_queued(make: Make) -> None:
    engine = make()
    request = engine.make_request([1], request_id="a", add=False)
    assert request.request_id == "a"
    assert not engine.has_unfinished
    assert engine.run_step() == StepResult()


def test_made_up_ids_pass_over_those_in_use(make: Make) -> None:
    engine = make()
    engine.make_request([1], request_id="request-1")
    assert [engine.make_request([1]).request_id for _ in range(2)] == ["request-0", "request-2"]


@pytest.mark.parametrize(
    "prompt",
    [[], [VOCAB_SIZE], [1, -1], [1] * MAX_MODEL_LEN, [1.0], [True], ["1"], [None], [[1, 2]], np.array([1.5])],
    ids=repr,
)
def test_a_prompt_that_cannot_be_served_is_refused_and_nothing_is_queued(make: Make, prompt: Any) -> None:
    engine = make()
    with pytest.raises(RequestError, match=r"^request 'a': ") as caught:
        engine.make_request(prompt, request_id="a")
    assert caught.value.request_id == "a"
    assert not engine.has_unfinished
    engine.make_request([1, 2], request_id="a", ignore_eos=True)  # the id is free
    assert [s.request_id for s in drain(engine)] == ["a"]


@pytest.mark.parametrize("length", [1, MAX_MODEL_LEN - 1])
def test_the_shortest_and_the_longest_prompt_are_served(make: Make, length: int) -> None:
    engine = make()
    engine.make_request([VOCAB_SIZE - 1] * length, max_tokens=3, ignore_eos=True)
    (states,) = drain(engine)
    assert states.num_prompt_tokens == length


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_no_token_to_sample_is_refused(make: Make, max_tokens: int) -> None:
    with pytest.raises(RequestError):
        make().make_request([1], max_tokens=max_tokens)


@pytest.mark.parametrize("request_id", ["", 3])
def test_an_id_that_is_no_text_is_refused(make: Make, request_id: Any) -> None:
    with pytest.raises(RequestError):
        make().make_request([1], request_id=request_id)


def test_an_id_is_in_use_until_its_states_were_collected(make: Make) -> None:
    engine = make()
    engine.make_request([1, 2], request_id="a", ignore_eos=True)
    for _ in range(2):
        with pytest.raises(RequestError, match=r"^request 'a': the id is in use"):
            engine.make_request([3], request_id="a")
        engine.run_step()
    assert [s.token_ids for s in engine.get_captured_states()] == [(1, 2)]
    engine.make_request([3], request_id="a", ignore_eos=True)
    assert [s.token_ids for s in drain(engine)] == [(3,)]


def test_an_aborted_request_is_left_out_and_its_id_is_free(make: Make) -> None:
    engine = make()
    for request_id in "abc":
        engine.make_request([1, 2], request_id=request_id, max_tokens=3, ignore_eos=True)
    engine.run_step()
    engine.abort("a", "c")
    assert engine.has_unfinished
    engine.make_request([3], request_id="a", ignore_eos=True)
    assert [(s.request_id, s.token_ids[0]) for s in drain(engine)] == [("a", 3), ("b", 1)]


def test_aborting_all_leaves_nothing_to_do(make: Make) -> None:
    engine = make()
    engine.make_request([1, 2], request_id="a")
    engine.abort("a")
    assert not engine.has_unfinished
    assert engine.get_captured_states() == []


def test_aborting_what_is_unknown_or_finished_changes_nothing(make: Make) -> None:
    engine = make()
    engine.make_request([1, 2], request_id="a", ignore_eos=True)
    engine.run_step()
    engine.abort("a", "never made")
    engine.abort()
    assert [s.request_id for s in engine.get_captured_states()] == ["a"]


CALLS: list[Callable[[Engine], object]] = [
    lambda engine: engine.make_request([1]),
    lambda engine: engine.run_step(),
    lambda engine: engine.get_captured_states(),
    lambda engine: engine.get_captured_states(wait=False),
    lambda engine: engine.abort("a"),
]


@pytest.mark.parametrize("call", CALLS)
def test_a_closed_engine_refuses(make: Make, call: Callable[[Engine], object]) -> None:
    engine = make()
    engine.make_request([1], request_id="a")
    assert not engine.closed
    engine.close()
    engine.close()
    assert engine.closed
    assert not engine.has_unfinished
    with pytest.raises(EngineClosedError, match=r"^the engine was closed") as caught:
        call(engine)
    assert caught.value.__cause__ is None


def test_a_with_block_closes_the_engine(make: Make) -> None:
    with make() as engine:
        assert isinstance(engine, Engine)
        assert not engine.closed
    assert engine.closed


def test_a_with_block_closes_the_engine_and_lets_the_error_through(make: Make) -> None:
    engine = make()
    with pytest.raises(KeyError, match="mine"), engine:
        raise KeyError("mine")
    assert engine.closed


def test_a_failed_step_closes_the_engine(make: Make) -> None:
    engine = make(failing=True)
    engine.make_request([1])
    with pytest.raises(StepError):
        engine.run_step()
    assert engine.closed
    assert not engine.has_unfinished


@pytest.mark.parametrize("call", CALLS)
def test_after_a_failed_step_every_call_tells_of_the_failure(make: Make, call: Callable[[Engine], object]) -> None:
    engine = make(failing=True)
    engine.make_request([1])
    with pytest.raises(StepError):
        engine.run_step()
    with pytest.raises(EngineClosedError) as caught:
        call(engine)
    assert caught.value.__cause__ is not None
