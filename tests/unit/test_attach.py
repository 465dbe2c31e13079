"""What open_engine() and attach() refuse, before anything is loaded or tapped, and what attach() takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.recording_engine import Executor, Scheduler, recorded_engine
from tests.unit.vllm_tree import importing, write_vllm

from vllm_compat import (
    AttachError,
    UnsupportedModelError,
    UnsupportedVllmError,
    UsageError,
    VllmNotFoundError,
    attach,
    open_engine,
)


@pytest.fixture(autouse=True)
def vllm(tmp_path: Path) -> Iterator[None]:
    with importing(tmp_path):
        yield


@pytest.fixture
def parts(tmp_path: Path) -> tuple[Scheduler, Executor]:
    """A scheduler and an executor of the caller's, in a vLLM that fits."""
    engine = recorded_engine(tmp_path, ())
    return engine.scheduler, engine.executor


def test_a_scheduler_and_an_executor_are_driven_and_left_running(parts: tuple[Scheduler, Executor]) -> None:
    scheduler, executor = parts
    executor.layer_ids = (1, "norm")
    with attach(scheduler=scheduler, executor=executor, layer_ids=[1, "norm"]) as engine:
        engine.make_request([1, 2], request_id="a", ignore_eos=True)
        engine.run_step()
        assert [s.layer_ids for s in engine.get_captured_states()] == [(1, "norm")]
        engine.make_request([3], request_id="b")
    assert executor.calls[0] == "vllm_compat_install"
    assert executor.calls[-1] == "vllm_compat_remove"
    assert set(scheduler.requests) == {"b"}


@pytest.mark.parametrize("wrapped", [False, True], ids=["EngineCore", "in-process client of LLM"])
def test_an_engine_core_is_driven(wrapped: bool, parts: tuple[Scheduler, Executor]) -> None:
    core = SimpleNamespace(scheduler=parts[0], model_executor=parts[1], request_block_hasher="its own")
    engine = attach(SimpleNamespace(engine_core=core) if wrapped else core)
    assert engine.make_request([1]).given["block_hasher"] == "its own"
    assert engine.run_step().num_scheduled_tokens == {"request-0": 1}


def test_either_a_core_or_both_others_are_wanted(parts: tuple[Scheduler, Executor]) -> None:
    scheduler, executor = parts
    given: list[dict[str, Any]] = [
        {},
        {"core": "core", "scheduler": scheduler, "executor": executor},
        {"core": "core", "scheduler": scheduler},
        {"scheduler": scheduler},
        {"executor": executor},
    ]
    for arguments in given:
        with pytest.raises(AttachError, match=r"attach\(\)") as caught:
            attach(**arguments)
        assert caught.value.exit_code == 2


def spoil(path: str, value: Any) -> Callable[[Any], None]:
    """Sets one field of a vLLM config, such as ``model_config.enforce_eager``."""

    def change(config: Any) -> None:
        *owners, name = path.split(".")
        for owner in owners:
            config = getattr(config, owner)
        setattr(config, name, value)

    return change


NOT_CAPTURED = [
    (spoil("cache_config.enable_prefix_caching", True), AttachError, "enable_prefix_caching=False"),
    (spoil("model_config.enforce_eager", False), AttachError, "enforce_eager=True"),
    (spoil("speculative_config", "a draft"), AttachError, "speculative_config"),
    (spoil("parallel_config.pipeline_parallel_size", 2), AttachError, "pipeline_parallel_size=2"),
    (spoil("parallel_config.data_parallel_size", 2), AttachError, "data_parallel_size=2"),
    (spoil("parallel_config.prefill_context_parallel_size", 2), AttachError, "prefill_context_parallel_size=2"),
    (spoil("model_config.is_encoder_decoder", True), UnsupportedModelError, "some/model: only decoder-only"),
    (spoil("model_config.runner_type", "pooling"), UnsupportedModelError, "some/model: only decoder-only"),
    (spoil("model_config.hf_text_config.num_hidden_layers", 1), UsageError, "layer id 3 is out of range"),
]


@pytest.mark.parametrize(("change", "error", "words"), NOT_CAPTURED)
def test_an_engine_that_cannot_be_captured_is_refused_and_not_touched(
    change: Callable[[Any], None], error: type[Exception], words: str, parts: tuple[Scheduler, Executor]
) -> None:
    scheduler, executor = parts
    change(scheduler.vllm_config)
    with pytest.raises(error, match=words):
        attach(scheduler=scheduler, executor=executor, layer_ids=[3])
    assert executor.calls == []


@pytest.mark.parametrize(("change", "error", "words"), NOT_CAPTURED)
def test_the_same_engine_is_driven_when_nothing_is_captured(
    change: Callable[[Any], None], error: type[Exception], words: str, parts: tuple[Scheduler, Executor]
) -> None:
    scheduler, executor = parts
    change(scheduler.vllm_config)
    engine = attach(SimpleNamespace(scheduler=scheduler, model_executor=executor, request_block_hasher=None))
    engine.make_request([1], request_id="a")
    assert engine.run_step().num_scheduled_tokens == {"a": 1}


@pytest.mark.parametrize("layer_ids", [(), (0,)])
def test_async_scheduling_is_refused(layer_ids: tuple[int, ...], parts: tuple[Scheduler, Executor]) -> None:
    scheduler, executor = parts
    scheduler.vllm_config.scheduler_config.async_scheduling = True
    with pytest.raises(AttachError, match="async_scheduling=False"):
        attach(scheduler=scheduler, executor=executor, layer_ids=layer_ids)
    assert executor.calls == []


@pytest.mark.parametrize("parallel", [1, 2])
def test_tensor_parallel_is_no_obstacle(parallel: int, parts: tuple[Scheduler, Executor]) -> None:
    scheduler, executor = parts
    scheduler.vllm_config.parallel_config.tensor_parallel_size = parallel
    assert attach(scheduler=scheduler, executor=executor, layer_ids=[0]).layer_ids == (0,)


@pytest.mark.parametrize(
    "begin",
    [
        lambda engine: open_engine("some/model"),
        lambda engine: attach(scheduler=engine.scheduler, executor=engine.executor),
    ],
    ids=["open_engine", "attach"],
)
def test_a_vllm_that_no_behaviour_fits_is_refused(begin: Callable[[Any], Any], tmp_path: Path) -> None:
    engine = recorded_engine(tmp_path, ())
    write_vllm(tmp_path, importable=True, request_params="tenant, request_id")
    with pytest.raises(UnsupportedVllmError, match="unknown required tenant"):
        begin(engine)


def test_no_vllm_is_said_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_compat._detect.installed._importable", lambda: None)
    with pytest.raises(VllmNotFoundError):
        open_engine("some/model")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtyp": "float32", "enforce_eagr": True}, "engine option 'dtyp' is not a field of this vLLM's EngineArgs"),
        ({"enforce_eagr": True}, r"'enforce_eagr' is not a field .*\. Did you mean 'enforce_eager'\?"),
        ({"async_scheduling": True}, "async_scheduling=True"),
        ({"layer_ids": [0], "enforce_eager": False}, "enforce_eager=False: a tap on a compiled model"),
        ({"layer_ids": [0], "speculative_config": {"model": "x"}}, "speculative_config: rows of rejected drafts"),
    ],
)
def test_options_that_cannot_mean_anything_are_refused_before_anything_is_loaded(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    tensor_parallel = {"engine/arg_utils.py": ENGINE_ARGS}
    write_vllm(tmp_path, importable=True, add=tensor_parallel)
    with pytest.raises(UsageError, match=words) as caught:
        open_engine("some/model", **options)
    assert caught.value.exit_code == 2


def test_what_is_fixed_while_capturing_and_what_is_left_to_vllm(tmp_path: Path) -> None:
    write_vllm(tmp_path, importable=True, add={"engine/arg_utils.py": ENGINE_ARGS})
    given = []
    for layer_ids in ((0,), ()):
        with pytest.raises(KeyError) as caught:  # the tree's create_engine_config() hands out what it was given
            open_engine("some/model", layer_ids=layer_ids, tensor_parallel_size=2)
        given.append(caught.value.args[0])
    always = {"model": "some/model", "tensor_parallel_size": 2, "enforce_eager": True, "async_scheduling": False}
    capturing = {
        "enable_prefix_caching": False,
        "worker_extension_cls": "vllm_compat._capture.extension.VllmCompatExtension",
    }
    assert given == [always | capturing, always]


ENGINE_ARGS = """
from dataclasses import dataclass, field

class EngineArgs:
    model: str = ""
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    enable_prefix_caching: bool | None = None
    speculative_config: dict | None = None
    worker_extension_cls: str = ""
    async_scheduling: bool | None = None

    def __init__(self, **given):
        self.given = given

    def create_engine_config(self):
        raise KeyError(self.given)

EngineArgs = dataclass(init=False)(EngineArgs)
"""
