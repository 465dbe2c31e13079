"""Wrapping an EngineCore, or a scheduler and an executor, that the caller built."""

from __future__ import annotations

import oracle
import pytest

import vllm_compat
from conftest import FLOAT32_ERROR, prompt, run


@pytest.fixture(scope="module")
def core(open_engine):
    """An EngineCore that knows nothing of capturing."""
    return open_engine("llama", enable_prefix_caching=False)


def built(core):
    return {"scheduler": core._scheduler, "executor": core._executor}


def test_states_from_a_scheduler_and_an_executor(core, model):
    with vllm_compat.attach(**built(core), layer_ids=[2, 5]) as engine:
        prompts = {"a": prompt(50, seed=1), "b": prompt(9, seed=2)}
        captured = run(engine, prompts)
    for request_id, token_ids in prompts.items():
        reference = oracle.states(model("llama"), token_ids)
        for layer in (2, 5):
            assert oracle.error(captured[request_id][layer], reference[layer]) < FLOAT32_ERROR


def test_closing_leaves_no_tap_behind(core):
    """Twice in a row, with other layers; and the caller's engine works on its own afterwards."""
    for layers in ([0], [4, "norm"]):
        with vllm_compat.attach(**built(core), layer_ids=layers) as engine:
            assert len(run(engine, {"a": prompt(5, seed=1)})["a"].hidden_states) == len(layers)
        with pytest.raises(vllm_compat.EngineClosedError):
            engine.run_step()
    assert set(core._executor.collective_rpc(taps_left)) == {0}
    assert len(run(core, {"mine": prompt(6, seed=3)})["mine"].output_token_ids) == 1


def taps_left(worker):
    """Run in the worker: hooks and wrapped methods that are still there."""
    runner = worker.model_runner
    model = runner.get_model()
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return hooks + ("execute_model" in vars(runner)) + ("forward" in vars(model))


def test_a_request_of_the_callers_own_is_left_alone(core):
    """One queued without us runs to its end and is in the step results; its states are not kept."""
    with vllm_compat.attach(**built(core), layer_ids=[0]) as engine:
        own = engine.make_request(prompt(4, seed=1), request_id="own")
        stranger = core.make_request(prompt(7, seed=2), request_id="stranger", add=False)
        core._scheduler.add_request(stranger)
        finished = {}
        while engine.has_unfinished:
            finished |= engine.run_step().finished
        assert finished.keys() == {"own", "stranger"}
        assert [s.request_id for s in engine.get_captured_states()] == ["own"] == [own.request_id]


def test_what_cannot_be_captured_is_refused_by_name(core):
    config = core._scheduler.vllm_config
    for owner, name, value, word in [
        (config.cache_config, "enable_prefix_caching", True, "prefix caching"),
        (config.model_config, "enforce_eager", False, "enforce_eager"),
        (config.parallel_config, "pipeline_parallel_size", 2, "pipeline_parallel_size"),
    ]:
        before = getattr(owner, name)
        setattr(owner, name, value)
        try:
            with pytest.raises(vllm_compat.AttachError, match=word):
                vllm_compat.attach(**built(core), layer_ids=[0])
        finally:
            setattr(owner, name, before)


def test_half_an_engine_is_refused(core):
    with pytest.raises(vllm_compat.AttachError):
        vllm_compat.attach()
    with pytest.raises(vllm_compat.AttachError, match="executor"):
        vllm_compat.attach(scheduler=core._scheduler)
    with pytest.raises(vllm_compat.UsageError, match="out of range"):
        vllm_compat.attach(**built(core), layer_ids=[6])
