"""The generator over made-up engines: arguments, order, and what a failure leaves."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import vllm_compat
from vllm_compat.speculators import VllmHiddenStatesGenerator, generator
from vllm_compat.testing import FakeEngine, fake_row


class Rows(list[Any]):
    """Stands for a tensor."""

    def clone(self, memory_format: object) -> Rows:
        assert memory_format == "contiguous"
        return Rows(self)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[Any, ...], dict[str, Any], FakeEngine]]:
    """Every call of ``open_engine``, answered with a made-up engine; and a made-up torch."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any], FakeEngine]] = []

    def open_engine(*arguments: Any, layer_ids: tuple[Any, ...], **options: Any) -> FakeEngine:
        engine = FakeEngine(layer_ids, num_layers=6, max_model_len=options["max_model_len"], make_tensor=Rows)
        calls.append((arguments, options | {"layer_ids": layer_ids}, engine))
        return engine

    torch = SimpleNamespace(tensor=lambda data, dtype: (dtype, data), long="int64", contiguous_format="contiguous")
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(generator, "open_engine", open_engine)
    monkeypatch.setattr(generator, "installed_final_state", lambda: ("pre-norm", "a test"))
    return calls


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 6}))
    return str(tmp_path)


def expected(layer_id: Any, token_ids: list[int]) -> list[list[float]]:
    return [fake_row(layer_id, token_ids[: n + 1], 8) for n in range(len(token_ids))]


def test_the_arguments_are_those_of_speculators() -> None:
    names = list(inspect.signature(VllmHiddenStatesGenerator.__init__).parameters)
    assert names[:7] == [
        *("self", "model_path", "layer_ids", "max_model_len", "gpu_memory_utilization", "tensor_parallel_size"),
        "max_num_batched_tokens",
    ]
    assert list(inspect.signature(VllmHiddenStatesGenerator.generate).parameters) == ["self", "token_ids"]


def test_the_engine_is_asked_for_what_was_given(model: str, opened: list[Any]) -> None:
    VllmHiddenStatesGenerator(model, [1], 99, 0.5, 2, 77, dtype="float32", max_num_seqs=3)
    assert opened[0][:2] == (
        (model,),
        {
            "layer_ids": (1,),
            "max_model_len": 99,
            "gpu_memory_utilization": 0.5,
            "tensor_parallel_size": 2,
            "max_num_batched_tokens": 77,
            "trust_remote_code": True,
            "dtype": "float32",
            "max_num_seqs": 3,
        },
    )


@pytest.mark.parametrize(("max_model_len", "budget"), [(2048, 8192), (10000, 10000)])
def test_the_defaults_are_those_of_speculators(model: str, opened: list[Any], max_model_len: int, budget: int) -> None:
    made = VllmHiddenStatesGenerator(model, max_model_len=max_model_len)
    assert made.layer_ids == [2, 3, 3, 5]
    assert opened[0][1]["layer_ids"] == (2, 3, 5)
    assert opened[0][1]["max_num_batched_tokens"] == budget
    assert made.vllm_config.cache_config.gpu_memory_utilization == 0.8
    assert made.vllm_config.model_config.max_model_len == max_model_len


def test_each_layer_lies_where_it_was_asked_for(model: str, opened: list[Any]) -> None:
    made = VllmHiddenStatesGenerator(model, [5, 1, 5], final_state="post-norm")
    ((_, options, _),) = opened
    assert options["layer_ids"] == (5, 1, "norm")
    (result,) = made.generate([[7, 8, 9]])
    assert result["input_ids"] == ("int64", [7, 8, 9])
    assert result["hidden_states"] == [expected(layer_id, [7, 8, 9]) for layer_id in (5, 1, "norm")]
    assert result["loss_mask"] is None


def test_results_come_in_the_order_of_the_prompts_call_after_call(model: str, opened: list[Any]) -> None:
    made = VllmHiddenStatesGenerator(model, [0])
    for call in range(3):
        prompts = [[call + 1, *range(5, 6 + (17 * n) % 90)] for n in range(50)]
        for token_ids, result in zip(prompts, made.generate(prompts), strict=True):
            assert result["input_ids"] == ("int64", token_ids)
            assert result["hidden_states"] == [expected(0, token_ids)]


def test_the_last_call_is_not_the_next_ones_after_an_interrupt(
    model: str, opened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = VllmHiddenStatesGenerator(model, [0])
    engine = opened[0][2]
    for good_steps in range(4):
        steps = iter([*[engine.run_step] * good_steps, _interrupt])
        with monkeypatch.context() as patch:
            patch.setattr(engine, "run_step", lambda steps=steps: next(steps)())
            with pytest.raises(KeyboardInterrupt):
                made.generate([[3] * 5, [4] * 300])
        assert not engine.has_unfinished
        (result,) = made.generate([[6, 7]])
        assert result["hidden_states"] == [expected(0, [6, 7])]


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_states_of_other_tokens_are_no_result(model: str, opened: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made = VllmHiddenStatesGenerator(model, [0])
    engine = opened[0][2]
    make: Callable[..., Any] = engine.make_request
    monkeypatch.setattr(engine, "make_request", lambda ids, request_id: make([*ids[:-1], 9], request_id=request_id))
    with pytest.raises(vllm_compat.CaptureError, match="of other tokens"):
        made.generate([[3, 4]])
    assert engine.closed


def test_states_that_never_come_are_no_result(model: str, opened: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made = VllmHiddenStatesGenerator(model, [0])
    monkeypatch.setattr(opened[0][2], "get_captured_states", list)
    with pytest.raises(vllm_compat.CaptureError, match="no states came for 2 of 2 prompts, the first '0-0'"):
        made.generate([[3, 4], [5]])
    assert opened[0][2].closed


def test_a_failed_step_closes_it(model: str, opened: list[Any]) -> None:
    made = VllmHiddenStatesGenerator(model, [0])
    opened[0][2]._fail_at_step = 0
    with pytest.raises(vllm_compat.StepError):
        made.generate([[3, 4]])
    with pytest.raises(vllm_compat.EngineClosedError):
        made.generate([[3, 4]])


@pytest.mark.parametrize("end", ["close", "with", "del"])
def test_the_engine_ends_with_it(model: str, opened: list[Any], end: str) -> None:
    made = VllmHiddenStatesGenerator(model, [0])
    if end == "with":
        with made as same:
            assert same is made
    elif end == "close":
        made.close()
        made.close()
    else:
        del made
    assert opened[0][2].closed


def test_a_generator_that_could_not_be_made_can_be_dropped(model: str, opened: list[Any]) -> None:
    with pytest.raises(ValueError, match="out of bounds"):
        VllmHiddenStatesGenerator(model, [6])
    assert not opened
