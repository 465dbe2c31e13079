"""Aborts, failures and closing: an engine is usable or closed, never half-way."""

from __future__ import annotations

import gc

import pytest
import zmq

import vllm_compat
from conftest import prompt, run


@pytest.fixture
def engine(open_engine):
    """Attached anew for each test: whatever a test breaks in the taps goes with them."""
    core = open_engine("llama", enable_prefix_caching=False, max_num_batched_tokens=64)
    with vllm_compat.attach(scheduler=core._scheduler, executor=core._executor, layer_ids=[1, 4]) as engine:
        yield engine


@pytest.fixture
def own_engine(open_engine):
    """For what leaves scheduler and workers beyond use."""
    return open_engine("llama", layer_ids=[1, 4], max_num_batched_tokens=64)


def test_an_idle_step_returns_at_once(engine):
    assert engine.run_step().idle
    assert not engine.has_unfinished
    assert engine.get_captured_states() == []


def test_finished_requests_are_flushed_from_the_workers(engine):
    run(engine, {"a": prompt(10, seed=1)})
    assert not engine._scheduler.has_requests()
    assert set(engine._executor.collective_rpc(requests_kept)) == {0}


def requests_kept(worker):
    """Run in the worker: requests its runner still knows."""
    runner = worker.model_runner
    return len(runner.requests) if hasattr(runner, "requests") else len(runner.req_states.req_id_to_index)


def test_an_aborted_request_leaves_nothing_and_the_others_are_right(engine):
    for n in range(4):
        engine.make_request(prompt(100, seed=n), request_id=f"r{n}")
    engine.run_step()
    engine.abort("r0", "r2", "never made")
    captured = {}
    while engine.has_unfinished:
        engine.run_step()
        captured |= {s.request_id: s for s in engine.get_captured_states()}
    assert captured.keys() == {"r1", "r3"}
    again = run(engine, {"r0": prompt(100, seed=0)})["r0"]
    assert again.token_ids == tuple(prompt(100, seed=0))
    engine.abort("r0")
    assert set(engine._executor.collective_rpc(rows_kept)) == {0}


def rows_kept(worker):
    """Run in the worker: requests whose rows are still held."""
    return len(worker.vllm_compat_tap._rows) if worker.vllm_compat_tap else 0


def test_bad_requests_are_refused_and_nothing_is_queued(engine):
    for token_ids, word in [
        ([], "0 tokens"),
        ([1] * 512, "512 tokens"),
        ([512], "512"),
        ([-1], "-1"),
        ([1.0], "1.0"),
        ([True], "True"),
    ]:
        with pytest.raises(vllm_compat.RequestError, match=word):
            engine.make_request(token_ids)
    engine.make_request([5, 6], request_id="twice")
    with pytest.raises(vllm_compat.RequestError, match="in use"):
        engine.make_request([5, 6], request_id="twice")
    with pytest.raises(vllm_compat.RequestError, match="max_tokens"):
        engine.make_request([5, 6], max_tokens=0)
    with pytest.raises(vllm_compat.RequestError, match="refused by vLLM"):
        engine.make_request([5, 6], sampling={"temperatur": 1})
    assert engine._scheduler.get_num_unfinished_requests() == 1
    engine.run_step()
    assert [s.token_ids for s in engine.get_captured_states()] == [(5, 6)]


def test_the_longest_prompt_is_captured_whole(engine):
    states = run(engine, {"long": prompt(511, seed=1)})["long"]
    assert states[4].shape == (511, 128)


def test_rows_of_other_tokens_are_refused(engine):
    """What a wrong order of rows looks like: the token ids that were forwarded are another request's."""
    engine._executor.collective_rpc(swap_owners)
    engine.make_request(prompt(10, seed=1), request_id="a")
    engine.make_request(prompt(10, seed=2), request_id="b")
    engine.run_step()
    with pytest.raises(vllm_compat.TokenMismatchError, match="position 0"):
        engine.get_captured_states()
    assert engine.closed


def swap_owners(worker):
    """Run in the worker: the runner's rows are read in reverse."""
    if worker.vllm_compat_tap:
        owners = worker.vllm_compat_tap._owners
        right = owners.request_ids
        owners.request_ids = lambda runner: list(right(runner))[::-1]


def test_a_layer_that_gives_no_state_is_refused(engine):
    """What a compiled model looks like to a tap: nothing comes, and nothing says so."""
    engine._executor.collective_rpc(take_a_hook_out)
    engine.make_request(prompt(10, seed=1))
    engine.run_step()
    with pytest.raises(vllm_compat.CaptureError, match="layer 1 gave 0 states"):
        engine.get_captured_states()


def take_a_hook_out(worker):
    """Run in the worker: the first tap is lost."""
    if worker.vllm_compat_tap:
        worker.vllm_compat_tap._removers.pop(0)()


def test_options_are_refused_before_anything_loads(model):
    folder = str(model("llama"))
    for options, word in [
        ({"layer_ids": [6]}, "0 to 5"),
        ({"layer_ids": [-1]}, "out of range"),
        ({"layer_ids": [3, 3]}, "more than once"),
        ({"layer_ids": [0], "enforce_eager": False}, "compiled"),
        (
            {"layer_ids": [0], "speculative_config": {"method": "ngram", "num_speculative_tokens": 1}},
            "speculative_config",
        ),
        ({"async_scheduling": True}, "async_scheduling"),
        ({"max_model_length": 100}, "Did you mean 'max_model_len'"),
    ]:
        with pytest.raises(vllm_compat.UsageError, match=word):
            vllm_compat.open_engine(folder, **options)


def test_a_failing_forward_closes_the_engine_and_says_why(own_engine):
    engine = own_engine
    engine._executor.collective_rpc(break_forward)
    engine.make_request(prompt(10, seed=1), request_id="lost")
    with pytest.raises(vllm_compat.StepError, match="broken on purpose"):
        engine.run_step()
    assert engine.closed
    assert not engine.has_unfinished
    with pytest.raises(vllm_compat.EngineClosedError, match="broken on purpose"):
        engine.make_request([1])
    with pytest.raises(vllm_compat.EngineClosedError):
        engine.get_captured_states()
    engine.close()
    # One that is left to Python with the traceback can keep it waiting for ever, in whatever comes next.
    assert not [item for item in gc.get_objects() if isinstance(item, zmq.Socket) and not item.closed]


def break_forward(worker):
    """Run in the worker: the next forward pass fails."""

    def fail(*args, **kwargs):
        raise ValueError("broken on purpose")

    worker.model_runner.get_model().forward = fail


def run_to_the_end(engine):
    while engine.has_unfinished:
        engine.run_step()


def test_a_second_phase_left_out_is_named(own_engine):
    """execute_model() by hand without sample_tokens(), then a step of ours."""
    engine = own_engine
    two_phase = vllm_compat.detect().capabilities["two_phase_step"]
    engine._patience = 0.3
    engine.make_request(prompt(10, seed=1), request_id="a")
    engine._executor.execute_model(engine._scheduler.schedule())
    engine.make_request(prompt(10, seed=2), request_id="b")
    if two_phase:
        with pytest.raises(vllm_compat.PendingStepError, match="sample_tokens"):
            engine.run_step()
    else:  # one phase: the result was thrown away, and its request waits for ever
        with pytest.raises(vllm_compat.StalledStepError, match="update_from_output"):
            run_to_the_end(engine)
    assert engine.closed
