"""The real engine over recording objects: what it asks of vLLM, and what it does when vLLM fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.recording_engine import Recorded, recorded_engine
from tests.unit.vllm_tree import importing

from vllm_compat import (
    CaptureError,
    EngineClosedError,
    PendingStepError,
    RequestError,
    StalledStepError,
    StepError,
    TokenMismatchError,
    UnsupportedModelError,
)
from vllm_compat._adapters.step import PENDING
from vllm_compat._capture.extension import Answer
from vllm_compat._capture.lending import Lent


@pytest.fixture(autouse=True)
def vllm(tmp_path: Path) -> Iterator[None]:
    with importing(tmp_path):
        yield


def options(request: Any) -> dict[str, Any]:
    given: dict[str, Any] = vars(request.given["sampling_params"])
    return given


# requests


def test_a_request_is_greedy_and_not_detokenized_and_ends_with_the_model_s_own_end(tmp_path: Path) -> None:
    engine = recorded_engine(tmp_path, end_token_ids=[7, 3])
    request = engine.make_request([1, 2], request_id="a")
    assert options(request) == {
        "temperature": 0.0, "seed": None, "max_tokens": 1, "stop_token_ids": [3, 7],
        "ignore_eos": False, "detokenize": False,
    }  # fmt: skip
    assert request.given["prompt_token_ids"] == [1, 2]
    assert request.given["block_hasher"] is None


def test_sampling_options_are_the_caller_s(tmp_path: Path) -> None:
    sampling = {"temperature": 0.5, "seed": 1, "stop_token_ids": [9], "detokenize": True}
    request = recorded_engine(tmp_path, end_token_ids=7).make_request([1], max_tokens=5, sampling=sampling)
    assert options(request) == {
        "temperature": 0.5, "seed": 1, "max_tokens": 5, "stop_token_ids": [7, 9],
        "ignore_eos": False, "detokenize": True,
    }  # fmt: skip
    assert sampling == {"temperature": 0.5, "seed": 1, "stop_token_ids": [9], "detokenize": True}


@pytest.mark.parametrize(("end", "stop"), [(7, []), (None, [])])
def test_the_model_s_own_end_is_left_out_when_it_is_to_be_ignored(end: Any, stop: list[int], tmp_path: Path) -> None:
    request = recorded_engine(tmp_path, end_token_ids=end).make_request([1], ignore_eos=True)
    assert options(request)["stop_token_ids"] == stop
    assert options(request)["ignore_eos"] is True


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"temperature": -1.0}, "temperature must be non-negative, got -1.0"),
        ({"temprature": 1.0}, "unexpected keyword argument 'temprature'"),
        ({"max_tokens": 3}, "max_tokens"),
    ],
)
def test_sampling_options_that_vllm_refuses_are_a_request_error(
    sampling: dict[str, Any], words: str, tmp_path: Path
) -> None:
    engine = recorded_engine(tmp_path)
    with pytest.raises(RequestError, match=words) as caught:
        engine.make_request([1], request_id="a", sampling=sampling)
    assert caught.value.request_id == "a"
    assert isinstance(caught.value.__cause__, (TypeError, ValueError))
    assert not engine.scheduler.requests
    engine.make_request([1], request_id="a")


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([1, 1000], r"token id 1000 is not an integer in range\(1000\), the model's vocabulary"),
        ([1, "2"], r"token id '2' is not an integer in range\(1000\)"),
        ([], r"the prompt has 0 tokens; wanted 1 to 63"),
        ([1] * 64, r"the prompt has 64 tokens; wanted 1 to 63"),
    ],
)
def test_a_refused_prompt_is_told_what_was_found_and_wanted(prompt: list[Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=words):
        recorded_engine(tmp_path).make_request(prompt)


# steps


def test_a_step_forwards_and_samples_once(tmp_path: Path) -> None:
    engine = recorded_engine(tmp_path, ())
    engine.make_request([1, 2], max_tokens=2, ignore_eos=True)
    engine.run_step()
    assert engine.executor.calls == ["execute_model", "sample_tokens"]


def test_what_is_done_meanwhile_is_done_between_the_phases_and_counts_from_the_next_step(tmp_path: Path) -> None:
    engine = recorded_engine(tmp_path, (0,))
    engine.make_request([1, 2], request_id="a", ignore_eos=True)
    engine.run_step()
    engine.make_request([3], request_id="b", ignore_eos=True)
    got: list[str] = []

    def meanwhile() -> None:
        engine.executor.calls.append("meanwhile")
        got.extend(states.request_id for states in engine.get_captured_states(wait=False))
        engine.make_request([4, 5], request_id="c", ignore_eos=True)

    engine.executor.calls.clear()
    step = engine.run_step(meanwhile)
    assert engine.executor.calls[:4] == ["execute_model", "meanwhile", "vllm_compat_collect", "sample_tokens"]
    assert engine.executor.calls.count("meanwhile") == 1
    assert (got, list(step.num_scheduled_tokens), list(step.finished)) == (["a"], ["b"], ["b"])
    assert list(engine.run_step().finished) == ["c"]
    assert [states.request_id for states in engine.get_captured_states()] == ["b", "c"]
    engine.run_step(meanwhile)  # nothing to do, nothing is called
    assert engine.executor.calls.count("meanwhile") == 1


def test_what_fails_meanwhile_is_raised_when_the_step_is_done(tmp_path: Path) -> None:
    engine = recorded_engine(tmp_path, (0,))
    engine.make_request([1, 2], request_id="a", ignore_eos=True)

    def meanwhile() -> None:
        engine.make_request([1], request_id="a")

    with pytest.raises(RequestError, match="in use"):
        engine.run_step(meanwhile)
    assert not engine.closed
    assert [states.request_id for states in engine.get_captured_states()] == ["a"]


def test_what_closes_the_engine_meanwhile_is_raised_as_it_is(tmp_path: Path) -> None:
    engine = recorded_engine(tmp_path, (0,))
    engine.make_request([5, 6], request_id="a", ignore_eos=True)
    engine.run_step()
    engine.executor.forwarded["a"][0] = 9
    engine.make_request([7], request_id="b")

    def meanwhile() -> None:
        engine.get_captured_states(wait=False)

    with pytest.raises(TokenMismatchError):
        engine.run_step(meanwhile)
    assert engine.closed
    with pytest.raises(EngineClosedError, match="because of TokenMismatchError"):
        engine.run_step()


def test_a_worker_that_died_is_a_failed_step(tmp_path: Path) -> None:
    """Whether its reply does not come, or it ends before the memory that it lends was opened."""
    for lent in (False, True):
        engine = finished(tmp_path)
        answer = Lent("w", 1, 2**22 - 1, 3, ())

        def reply_of(method: str, args: Any = (), lent: bool = lent, answer: Any = answer) -> list[Any]:
            if not lent:
                raise RuntimeError("Executor failed.")
            return [Answer(None, {"a": answer}, "w")]

        engine.executor.collective_rpc = reply_of  # type: ignore[method-assign]
        with pytest.raises(StepError, match="A worker may have died"):
            engine.get_captured_states()
        assert engine.closed


def test_the_last_step_also_tells_the_workers_that_all_have_finished(tmp_path: Path) -> None:
    engine = recorded_engine(tmp_path, ())
    engine.make_request([1, 2], ignore_eos=True)
    engine.run_step()
    assert engine.executor.calls == ["execute_model", "sample_tokens", "execute_model"]
    assert not engine.scheduler.has_requests()


def test_the_workers_are_told_of_an_abort_though_nothing_is_left_to_do(tmp_path: Path) -> None:
    engine = recorded_engine(tmp_path, ())
    engine.make_request([1, 2], request_id="a")
    engine.abort("a")
    assert engine.run_step().idle
    assert not engine.scheduler.has_requests()
    assert engine.executor.calls == ["execute_model"]


def test_an_idle_step_does_not_call_vllm(tmp_path: Path) -> None:
    engine = recorded_engine(tmp_path, ())
    engine.run_step()
    assert engine.executor.calls == []


def test_only_unfinished_requests_of_ours_are_aborted_in_vllm(tmp_path: Path) -> None:
    engine = recorded_engine(tmp_path)
    engine.make_request([1], request_id="done", ignore_eos=True)
    engine.make_request([1], request_id="going", max_tokens=3, ignore_eos=True)
    engine.run_step()
    engine.abort("done", "going", "unknown")
    assert engine.scheduler.aborted == [["going"]]


@pytest.mark.parametrize("failure", [RuntimeError("out of memory"), ValueError(), TypeError("x")])
def test_a_failure_inside_vllm_is_a_step_error_with_its_cause(failure: Exception, tmp_path: Path) -> None:
    closed: list[str] = []
    engine = recorded_engine(tmp_path, shut_down=lambda: closed.append("shut down"))
    engine.make_request([1])
    engine.executor.failure = failure
    with pytest.raises(StepError, match=f"a step failed inside vLLM: {type(failure).__name__}: {failure}") as caught:
        engine.run_step()
    assert type(caught.value) is StepError
    assert caught.value.__cause__ is failure
    assert "its 1 request(s) are lost" in str(caught.value)
    assert closed == ["shut down"]
    assert engine.executor.calls[-1] == "execute_model"  # workers that failed are not asked for anything more
    with pytest.raises(EngineClosedError, match=f"the engine was closed because of {type(failure).__name__}") as later:
        engine.run_step()
    assert later.value.__cause__ is failure


def test_a_forward_pass_without_its_second_phase_is_a_pending_step(tmp_path: Path) -> None:
    engine = recorded_engine(tmp_path)
    engine.make_request([1])
    engine.executor.failure = RuntimeError(f"State error: {PENDING}.")
    with pytest.raises(PendingStepError, match=r"executor\.sample_tokens") as caught:
        engine.run_step()
    assert caught.value.__cause__ is engine.executor.failure
    assert engine.closed


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), SystemExit(1)])
def test_an_interrupt_closes_the_engine_and_goes_on_as_it_is(failure: BaseException, tmp_path: Path) -> None:
    engine = recorded_engine(tmp_path)
    engine.make_request([1])
    engine.executor.failure = failure
    with pytest.raises(type(failure)):
        engine.run_step()
    assert engine.closed


def test_the_failure_of_a_step_is_worth_more_than_that_of_closing_after_it(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError("a worker is gone")

    engine = recorded_engine(tmp_path, shut_down=fail)
    engine.make_request([1])
    engine.executor.failure = RuntimeError("out of memory")
    with pytest.raises(StepError, match="out of memory"):
        engine.run_step()
    assert engine.closed


def test_a_scheduler_that_chooses_nothing_for_long_is_a_stalled_step(tmp_path: Path) -> None:
    engine = recorded_engine(tmp_path)
    engine.make_request([1], request_id="a")
    engine.make_request([1], request_id="b")
    engine.scheduler.stuck = True
    assert engine.run_step().idle
    engine._patience = 0.0
    with pytest.raises(StalledStepError, match=r"2 request\(s\) wait and none can be .* \(first: a, b\)") as caught:
        engine.run_step()
    assert caught.value.request_ids == ("a", "b")
    assert engine.closed


def test_a_scheduler_that_chooses_again_in_time_is_not_stalled(tmp_path: Path) -> None:
    engine = recorded_engine(tmp_path)
    engine.make_request([1], request_id="a", max_tokens=3, ignore_eos=True)
    engine.scheduler.stuck = True
    engine.run_step()
    engine.scheduler.stuck = False
    engine._patience = 0.0
    assert engine.run_step().num_scheduled_tokens == {"a": 1}
    engine.scheduler.stuck = True
    assert engine.run_step().idle  # patience begins anew


# states


def test_taps_in_the_caller_s_engine_are_taken_out_at_the_end(tmp_path: Path) -> None:
    engine = recorded_engine(tmp_path)
    assert engine.executor.calls == ["vllm_compat_install"]
    engine.close()
    engine.close()
    assert engine.executor.calls == ["vllm_compat_install", "vllm_compat_remove"]


def test_an_engine_of_our_own_is_shut_down_with_the_taps_in_it(tmp_path: Path) -> None:
    closed: list[str] = []
    engine = recorded_engine(tmp_path, shut_down=lambda: closed.append("shut down"))
    engine.close()
    engine.close()
    assert engine.executor.calls == ["vllm_compat_install"]
    assert closed == ["shut down"]


def test_without_layers_the_workers_are_never_asked(tmp_path: Path) -> None:
    engine = recorded_engine(tmp_path, ())
    engine.make_request([1], ignore_eos=True)
    engine.run_step()
    assert len(engine.get_captured_states()) == 1
    engine.close()
    assert not [name for name in engine.executor.calls if name.startswith("vllm_compat")]


def test_an_engine_of_the_caller_s_is_left_running(tmp_path: Path) -> None:
    engine = recorded_engine(tmp_path, shut_down=None)
    engine.make_request([1], request_id="a")
    engine.close()
    assert engine.scheduler.has_unfinished_requests()


def test_nothing_is_collected_where_nothing_finished(tmp_path: Path) -> None:
    engine = recorded_engine(tmp_path)
    engine.make_request([1], max_tokens=3, ignore_eos=True)
    engine.run_step()
    assert engine.get_captured_states() == []
    assert engine.executor.collected == []


def test_rows_of_aborted_requests_are_forgotten_in_the_workers(tmp_path: Path) -> None:
    engine = recorded_engine(tmp_path)
    for request_id in "ab":
        engine.make_request([1], request_id=request_id, max_tokens=2, ignore_eos=True)
    engine.run_step()
    engine.abort("a")
    assert engine.get_captured_states() == []
    assert engine.executor.collected == [([], ["a"])]
    engine.run_step()
    assert [s.request_id for s in engine.get_captured_states()] == ["b"]
    assert engine.executor.collected == [([], ["a"]), (["b"], [])]


def test_rows_of_requests_that_the_caller_queued_himself_are_forgotten_in_the_workers(tmp_path: Path) -> None:
    engine = recorded_engine(tmp_path)
    stranger = engine.make_request([1, 2], request_id="stranger", add=False, ignore_eos=True)
    del engine._tracked["stranger"]  # one that another front end made
    engine.scheduler.add_request(stranger)
    assert set(engine.run_step().finished) == {"stranger"}
    assert engine.get_captured_states() == []
    assert engine.executor.collected == [([], ["stranger"])]
    assert engine.executor.forwarded == {}


def test_a_request_that_the_caller_queued_himself_is_collected_like_any_other(tmp_path: Path) -> None:
    engine = recorded_engine(tmp_path)
    engine.scheduler.add_request(engine.make_request([1, 2], request_id="a", add=False, ignore_eos=True))
    engine.run_step()
    assert [s.request_id for s in engine.get_captured_states()] == ["a"]


def test_an_abort_is_told_to_the_workers_though_other_states_are_not_ready(tmp_path: Path) -> None:
    engine = recorded_engine(tmp_path)
    for request_id, max_tokens in (("a", 1), ("b", 2)):
        engine.make_request([1], request_id=request_id, max_tokens=max_tokens, ignore_eos=True)
    engine.run_step()
    engine.abort("b")
    assert engine.get_captured_states(wait=False) == []
    assert engine.get_captured_states(wait=False) == []
    assert [s.request_id for s in engine.get_captured_states()] == ["a"]
    assert engine.executor.collected == [(["a"], ["b"]), (["a"], []), (["a"], [])]


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_request_that_ended_badly_is_dropped_without_waiting(reason: str, tmp_path: Path) -> None:
    engine = finished(tmp_path)
    engine._tracked["a"].finish_reason = reason
    assert engine.get_captured_states(wait=False) == []
    assert engine.executor.collected == [([], ["a"])]
    engine.make_request([1], request_id="a")


def finished(site: Path) -> Recorded:
    """An engine with a finished request of three tokens, not yet collected."""
    engine = recorded_engine(site, (0, "norm"))
    engine.make_request([5, 6, 7], request_id="a", ignore_eos=True)
    engine.run_step()
    return engine


def reply(engine: Recorded, *answers: Any) -> None:
    engine.executor.collective_rpc = lambda method, args=(): list(answers)  # type: ignore[method-assign]


ROWS = np.zeros((3, 8))


def test_layers_that_come_in_one_tensor_are_told_apart(tmp_path: Path) -> None:
    engine = finished(tmp_path)
    stack = np.arange(3 * 2 * 8).reshape(3, 2, 8)
    reply(engine, Answer(None, {"a": (np.array([5, 6, 7]), stack)}), None)
    (states,) = engine.get_captured_states()
    assert states[0].tolist() == stack[:, 0].tolist()
    assert states["norm"].tolist() == stack[:, 1].tolist()
    assert all(np.shares_memory(layer, stack) for layer in states.hidden_states)


def test_a_row_of_another_token_is_a_token_mismatch(tmp_path: Path) -> None:
    engine = finished(tmp_path)
    engine.executor.forwarded["a"][1] = 9
    with pytest.raises(TokenMismatchError, match=r"at position 1 .* received token 9, the request has 6") as caught:
        engine.get_captured_states()
    assert (caught.value.request_id, caught.value.position, caught.value.exit_code) == ("a", 1, 5)
    assert engine.closed
    with pytest.raises(EngineClosedError, match="because of TokenMismatchError"):
        engine.run_step()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((None, {}), "request 'a' finished, and no row of it was ever captured"),
        (("a layer gave nothing", {}), "capturing failed: a layer gave nothing"),
        ((None, {"a": (np.array([5, 6]), [ROWS[:2], ROWS[:2]])}), "3 tokens were to be forwarded, 2 were"),
        (
            (None, {"a": (np.array([5, 6, 7]), np.zeros((2, 2, 8)))}),
            r"the states are \{0: \(2, 8\), 'norm': \(2, 8\)\}",
        ),
        ((None, {"a": (np.array([5, 6, 7, 8]), [ROWS, ROWS])}), "3 tokens were to be forwarded, 4 were"),
        ((None, {"a": (np.array([5, 6, 7]), [ROWS, ROWS[:2]])}), r"the states are \{0: \(3, 8\), 'norm': \(2, 8\)\}"),
        ((None, {"a": (np.array([5, 6, 7]), [ROWS, ROWS[0]])}), r"the states are \{0: \(3, 8\), 'norm': \(8,\)\}"),
    ],
)
def test_states_that_cannot_be_vouched_for_are_a_capture_error(answer: Any, words: str, tmp_path: Path) -> None:
    engine = finished(tmp_path)
    reply(engine, Answer(*answer), None)
    with pytest.raises(CaptureError, match=words):
        engine.get_captured_states()
    assert engine.closed


A = (np.array([5, 6, 7]), [ROWS, ROWS])


def test_each_worker_has_its_share(tmp_path: Path) -> None:
    engine = finished(tmp_path)
    engine.make_request([8, 9], request_id="b", ignore_eos=True)
    engine.run_step()
    reply(engine, Answer(None, {"b": (np.array([8, 9]), [ROWS[:2], ROWS[:2]])}), None, Answer(None, {"a": A}))
    assert [states.request_id for states in engine.get_captured_states()] == ["a", "b"]


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([None, None], "none of 2 workers answered with captured states"),
        ([], "none of 0 workers"),
        ([Answer(None, {}), Answer(None, {})], "request 'a' finished, and no row of it was ever captured"),
        ([Answer(None, {"a": A}), Answer(None, {"a": A})], r"more than one worker captured \['a'\]"),
        ([Answer(None, {"a": A}), Answer("torn", {})], "capturing failed: torn"),
    ],
)
def test_exactly_one_worker_must_have_a_request(answers: list[Any], words: str, tmp_path: Path) -> None:
    engine = finished(tmp_path)
    reply(engine, *answers)
    with pytest.raises(CaptureError, match=words):
        engine.get_captured_states()
    assert engine.closed


def test_taps_that_could_not_be_put_in_everywhere_are_taken_out_again(tmp_path: Path) -> None:
    from vllm_compat._adapters.registry import choose
    from vllm_compat._detect.surface import Surface
    from vllm_compat._engine.capture import Capture

    engine = recorded_engine(tmp_path)
    adapter, calls = choose(Surface(tmp_path / "vllm")), []

    class Failing:
        def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
            calls.append((method, args))
            if method == "vllm_compat_install":
                raise RuntimeError("one worker has no such layer")
            return []

    with pytest.raises(UnsupportedModelError, match="one worker has no such layer"):
        Capture(Failing(), engine.scheduler.vllm_config, (3, "norm"), adapter)
    installed = ((3, "norm"), "layer-hooks", os.getpid(), False)
    assert calls == [("vllm_compat_install", installed), ("vllm_compat_remove", ())]


def test_workers_without_the_extension_are_sent_its_functions(tmp_path: Path) -> None:
    from vllm_compat._adapters.registry import choose
    from vllm_compat._capture.extension import VllmCompatExtension
    from vllm_compat._detect.surface import Surface
    from vllm_compat._engine.capture import Capture

    engine = recorded_engine(tmp_path)
    engine.scheduler.vllm_config.parallel_config.worker_extension_cls = ""
    methods: list[Any] = []

    class Executor:
        def collective_rpc(self, method: Any, args: tuple[Any, ...] = ()) -> list[Any]:
            methods.append(method)
            return []

    capture = Capture(Executor(), engine.scheduler.vllm_config, (0,), choose(Surface(tmp_path / "vllm")))
    capture.remove()
    assert methods == [VllmCompatExtension.vllm_compat_install, VllmCompatExtension.vllm_compat_remove]
