"""The taps in a worker, on a small model and a runner that records: whose rows are whose, and what is refused.

Each test runs three times: on the CPU as it is, and on a device whose copies are done as late as they may, or at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.slow_device import SlowDevice
from tests.unit.vllm_tree import importing, write_vllm

from vllm_compat import UnsupportedModelError
from vllm_compat._adapters.step import PENDING
from vllm_compat._capture.division import Division
from vllm_compat._capture.host import InPlace, SideStream
from vllm_compat._capture.layers import find_decoder_layers
from vllm_compat._capture.lending import Borrower, LendingMemory
from vllm_compat._capture.tap import Tap

torch: Any = pytest.importorskip("torch")

NUM_LAYERS, HIDDEN_SIZE = 3, 4
EMBEDDING = "import torch\nclass VocabParallelEmbedding(torch.nn.Embedding): ...\n"


# a worker


class Layer(torch.nn.Module):  # type: ignore[misc]
    """Hands on its state as vLLM's layers do: two summands, which the next layer writes over."""

    def forward(self, hidden: Any, residual: Any) -> Any:
        residual += hidden
        return torch.ones_like(residual), residual


class Model(torch.nn.Module):  # type: ignore[misc]
    """The state leaving layer k, for token t, is ``t + k + 1`` everywhere; after the norm it is negative."""

    def __init__(self) -> None:
        super().__init__()
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        self.embed = VocabParallelEmbedding(100, HIDDEN_SIZE)
        self.layers = torch.nn.ModuleList([Layer() for _ in range(NUM_LAYERS)])
        self.others = torch.nn.ModuleList([Layer() for _ in range(NUM_LAYERS + 1)])

    def forward(self, input_ids: Any, positions: Any = None) -> Any:
        hidden = input_ids[:, None] * torch.ones(HIDDEN_SIZE)
        residual = torch.zeros_like(hidden)
        for layer in self.layers:
            hidden, residual = layer(hidden, residual)
        return -(hidden + residual)


class Runner:
    """The V1 runner's surface: one buffer for every step. ``order`` is that of its rows; padding rows follow them."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.input_batch = SimpleNamespace(req_ids=[])
        self.input_ids = SimpleNamespace(gpu=None)
        self.execute_model_state: Any = None
        self.buffer = torch.zeros(32, dtype=torch.int64)
        self.order: list[str] | None = None
        self.padding = 0
        self.by_keyword: bool | None = True
        self.passes = 1

    def get_model(self) -> Any:
        return self.model

    def execute_model(self, scheduler_output: Any, dummy_run: bool = False) -> str:
        tokens = scheduler_output.tokens
        self.input_batch.req_ids = self.order or list(tokens)
        rows = [t for i in self.input_batch.req_ids for t in tokens.get(i, ())]
        if not rows:
            return "nothing to do"
        ids = self.buffer[: len(rows) + self.padding]
        ids[:] = torch.tensor(rows + [0] * self.padding)[: len(ids)]
        for _ in range(self.passes):
            arguments, named = {True: ((), {"input_ids": ids}), False: ((ids,), {}), None: ((), {})}[self.by_keyword]
            self.model.forward(*arguments, **named).zero_()  # whoever samples may write over it
        return "done"


@pytest.fixture(params=["cpu", "late", "prompt"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SlowDevice | None:
    """The device that the taps believe to be on; None for the CPU."""
    device = None if request.param == "cpu" else SlowDevice(prompt=request.param == "prompt")
    if request.param == "late":  # rows of different ranks are kept apart; else they are so few that they are joined
        monkeypatch.setattr("vllm_compat._capture.host._SHORT_BYTES", 0)
    monkeypatch.setattr(
        "vllm_compat._capture.stack.host_copy",
        lambda of: SideStream(device) if device else InPlace(),  # type: ignore[arg-type]
    )
    return device


@pytest.fixture
def runner(device: SlowDevice | None, tmp_path: Path) -> Iterator[Runner]:
    path = "model_executor/layers/vocab_parallel_embedding.py"
    write_vllm(tmp_path, importable=True, add={path: EMBEDDING})
    with importing(tmp_path):
        yield Runner(Model())


def tap(runner: Runner, *layer_ids: Any, **options: Any) -> Tap:
    text_config = SimpleNamespace(num_hidden_layers=NUM_LAYERS)
    worker = SimpleNamespace(model_runner=runner, model_config=SimpleNamespace(hf_text_config=text_config))
    return Tap(worker, layer_ids, "layer-hooks", **options)


def chosen(
    new: dict[str, list[int]],
    going: dict[str, tuple[int, list[int]]] | None = None,
    prompts: dict[str, list[int]] | None = None,
    cached: dict[str, int] | None = None,
) -> Any:
    """A scheduler's output: request id -> tokens of new ones, -> (position, tokens) of those that go on.

    ``prompts``: the whole prompts of new ones that come in pieces. ``cached``: how many tokens of them a cache had.
    """
    going = going or {}
    tokens = new | {i: t for i, (_, t) in going.items()}
    return SimpleNamespace(
        tokens=tokens,
        num_scheduled_tokens={i: len(t) for i, t in tokens.items()},
        total_num_scheduled_tokens=sum(map(len, tokens.values())),
        scheduled_new_reqs=[
            SimpleNamespace(
                req_id=i, num_computed_tokens=(cached or {}).get(i, 0), prompt_token_ids=(prompts or new).get(i)
            )
            for i in new
        ],
        scheduled_cached_reqs=SimpleNamespace(req_ids=list(going), num_computed_tokens=[p for p, _ in going.values()]),
    )


def layers(states: Any) -> Any:
    """One tensor for each layer, whichever way they came."""
    return states if isinstance(states, list) else states.unbind(1)


def collected(found: Tap, *finished: str, wait: bool = True) -> dict[str, Any]:
    """Request id -> token ids, then the first column of each layer; None where they are not ready."""
    fault, captured = found.collect(finished, [], wait)
    assert fault is None
    rows: dict[str, Any] = dict(captured)
    return {
        i: None if kept is None else [kept[0].tolist(), *(s[:, 0].int().tolist() for s in layers(kept[1]))]
        for i, kept in rows.items()
    }


@pytest.mark.parametrize("by_keyword", [True, False])
@pytest.mark.parametrize("padding", [0, 3])
def test_each_request_gets_the_states_of_its_own_rows(runner: Runner, by_keyword: bool, padding: int) -> None:
    found = tap(runner, 2, "norm", 0)
    runner.by_keyword, runner.padding, runner.order = by_keyword, padding, ["b", "a"]
    assert runner.execute_model(chosen({"a": [5, 6], "b": [7, 8, 9]})) == "done"
    assert collected(found, "a", "b") == {
        "a": [[5, 6], [8, 9], [-8, -9], [6, 7]],
        "b": [[7, 8, 9], [10, 11, 12], [-10, -11, -12], [8, 9, 10]],
    }
    assert collected(found, "a", "b") == {}


def test_a_request_s_pieces_are_joined_over_steps_and_batches(runner: Runner) -> None:
    found = tap(runner, 1)
    runner.execute_model(chosen({"a": [5, 6]}))
    runner.execute_model(chosen({"b": [1]}, {"a": (2, [7])}))
    runner.execute_model(chosen({}, {"a": (3, [8]), "b": (1, [2])}))
    assert collected(found, "a") == {"a": [[5, 6, 7, 8], [7, 8, 9, 10]]}
    assert collected(found, "b") == {"b": [[1, 2], [3, 4]]}


def test_a_request_resumed_after_preemption_starts_over(runner: Runner) -> None:
    found = tap(runner, 1)
    runner.execute_model(chosen({"a": [5, 6]}))
    runner.execute_model(chosen({}, {"a": (0, [5, 6, 7])}))
    assert collected(found, "a") == {"a": [[5, 6, 7], [7, 8, 9]]}


def test_rows_of_dropped_requests_are_forgotten(runner: Runner) -> None:
    found = tap(runner, 1)
    runner.execute_model(chosen({"a": [5], "b": [6]}))
    found.collect([], ["a", "never seen"], True)
    assert collected(found, "a", "b") == {"b": [[6], [8]]}


def test_steps_that_forward_nothing_of_a_request_s_leave_no_rows(runner: Runner) -> None:
    found = tap(runner, 1)
    assert runner.execute_model(chosen({})) == "nothing to do"
    runner.execute_model(chosen({"a": [5]}))
    runner.execute_model(chosen({"warm-up": [1, 2]}), dummy_run=True)
    runner.model(torch.tensor([3]))  # a forward pass outside of any step
    assert collected(found, "warm-up", "a") == {"a": [[5], [7]]}


def test_states_reach_the_host_stacked_in_the_model_s_own_type_and_in_memory_of_their_own(runner: Runner) -> None:
    found = tap(runner, 1, "norm")
    with torch.inference_mode():
        runner.execute_model(chosen({"a": [5], "b": [1, 2, 3]}))
        runner.execute_model(chosen({"c": [6]}))
        (kept,) = found.collect(["a"], [], True)[1].values()
    assert isinstance(kept, tuple)
    ids, states = kept
    assert (states.dtype, states.shape, states.device.type) == (torch.float32, (1, 2, HIDDEN_SIZE), "cpu")
    assert (ids.shape, states.is_contiguous()) == ((1,), True)
    for tensor in (ids, states):
        assert not tensor.is_inference()
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    assert states[0, :, 0].tolist() == [7, -8]


def test_each_rank_has_the_states_of_its_own_requests(runner: Runner, device: SlowDevice | None) -> None:
    """Preempted, dropped, made anew or in pieces: a request stays with its rank, and is nobody else's."""
    runners = [runner, Runner(Model())]
    taps = [tap(each, 1, division=Division(rank, 2)) for rank, each in enumerate(runners)]
    tokens = {"a": [5, 6, 7], "b": [8, 9], "c": [1], "d": [2, 3], "e": [4]}
    passes = [
        chosen({"a": [5, 6], "b": [8], "c": [1]}, prompts=tokens),
        chosen({"d": [2, 3]}, {"b": (1, [9]), "a": (0, [5, 6])}, prompts=tokens),
        chosen({}, {"a": (2, [7])}),
        chosen({"e": [4], "b": [8, 9]}, prompts=tokens),
    ]
    for output in passes:
        for number, each in enumerate(runners):
            each.order = list(output.tokens)[:: 1 - 2 * number]
            each.execute_model(output)
        if output is passes[1]:
            for one in taps:
                one.collect([], ["b"], True)  # dropped, and made anew
    found = [collected(each, *tokens) for each in taps]
    assert found[0].keys() & found[1].keys() == set()
    assert found[0] | found[1] == {i: [ids, [t + 2 for t in ids]] for i, ids in tokens.items()}
    assert all(found)
    assert [collected(each, *tokens) for each in taps] == [{}, {}]
    if device:
        copied = [line for line in device.log if "copies" in line]
        assert len(copied) < 2 * 2 * sum(len(output.tokens) for output in passes), "each copies its own rows"


def test_rows_that_another_process_can_map_are_lent(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_compat._capture.memory.LEAST", 1)
    memory = LendingMemory()
    found = tap(runner, 1, memory=memory)
    borrower = Borrower()
    for n in range(30):
        runner.execute_model(chosen({"a": [n, 6], "b": [7]}))
        fault, rows = found.collect(["a"], ["b"], True, (), True)
        assert fault is None
        ids, states = borrower.tensors(rows["a"])  # type: ignore[arg-type]
        assert (ids.tolist(), states[:, 0, 0].tolist()) == ([n, 6], [n + 2, 8])
        del ids, states
        memory.returned(borrower.returned()[memory.worker])
    assert memory._made <= 6, "used again"
    runner.execute_model(chosen({"c": [4]}))
    assert collected(found, "c") == {"c": [[4], [6]]}, "without lending they come as they are"
    found.remove()


def test_passes_of_any_size_follow_each_other(runner: Runner) -> None:
    found = tap(runner, 0, 2)
    sizes = [2, 7, 1, 7, 9, 3, 3, 8]
    prompts = {str(n): list(range(10 * n, 10 * n + size)) for n, size in enumerate(sizes)}
    for n in range(len(sizes)):
        runner.execute_model(chosen({str(n): prompts[str(n)]}))
    assert collected(found, *prompts) == {
        i: [tokens, [t + 1 for t in tokens], [t + 3 for t in tokens]] for i, tokens in prompts.items()
    }


def test_a_prompt_in_pieces_and_its_answer(runner: Runner) -> None:
    found = tap(runner, 1)
    runner.execute_model(chosen({"a": [5, 6]}, prompts={"a": [5, 6, 7, 8]}))
    runner.execute_model(chosen({"b": [1]}, {"a": (2, [7, 8])}))
    for n in range(70):
        runner.execute_model(chosen({}, {"a": (4 + n, [n])}))
    tokens = [5, 6, 7, 8, *range(70)]
    assert collected(found, "a", "b") == {"a": [tokens, [t + 2 for t in tokens]], "b": [[1], [3]]}


def test_without_waiting_the_rows_of_the_last_pass_come_after_the_next(
    runner: Runner, device: SlowDevice | None
) -> None:
    found = tap(runner, 1)
    runner.execute_model(chosen({"a": [5], "b": [6]}))
    if device is None:
        assert collected(found, "a", wait=False) == {"a": [[5], [7]]}
        return
    for _ in range(2):
        assert collected(found, "a", "never seen", wait=False) == {"a": None}
    runner.execute_model(chosen({"c": [8]}, {"b": (1, [7])}))
    assert collected(found, "a", "b", wait=False) == {"a": [[5], [7]], "b": None}
    runner.execute_model(chosen({}))
    assert collected(found, "b", "c", wait=False) == {"b": None, "c": None}
    assert collected(found, "c", wait=True) == {"c": [[8], [10]]}
    assert collected(found, "a", "b", "c", wait=False) == {"b": [[6, 7], [8, 9]]}


def test_a_copy_begins_with_the_next_pass_and_is_waited_for_when_that_is_queued_or_when_asked_to(
    runner: Runner, device: SlowDevice | None
) -> None:
    if device is None:
        pytest.skip("the CPU copies nothing")
    found = tap(runner, 0, "norm")
    forward = runner.model.forward

    def and_sample(input_ids: Any) -> Any:
        states = forward(input_ids=input_ids)
        device.log.append("host samples")
        return states

    runner.model.forward = and_sample
    for request_id in "abc":
        runner.execute_model(chosen({request_id: [5]}))
        found.collect([], [], False)
    layer = f"side copies [1, {HIDDEN_SIZE}]"
    sent = ["side waits for what model has done", "side copies [1]", layer, layer]
    queued, given_out = "model waits for what side has done", "host waits for what side has done"
    assert device.log == [
        "model waits for nothing", "host samples",
        *sent, queued, given_out, "host samples",
        *sent, queued, given_out, "host samples",
    ]  # fmt: skip
    device.log.clear()
    found.collect([], ["a"], True)
    found.collect(["b"], [], True)
    assert device.log == []
    found.collect(["c"], [], True)
    assert device.log == [*sent, given_out]


def test_rows_are_given_out_in_time_though_the_model_is_entered_by_another_door(runner: Runner) -> None:
    found = tap(runner, 1)
    del runner.model.forward  # our tap on it: only the layers' are left
    runner.input_ids.gpu = runner.buffer
    for request_id, tokens in {"a": [5, 6], "b": [7, 8, 9], "c": [1]}.items():
        runner.execute_model(chosen({request_id: tokens}))
    assert collected(found, "a", "b", "c") == {"a": [[5, 6], [7, 8]], "b": [[7, 8, 9], [9, 10, 11]], "c": [[1], [3]]}


def test_rows_dropped_while_they_are_on_their_way_are_forgotten(runner: Runner) -> None:
    found = tap(runner, 1)
    runner.execute_model(chosen({"a": [5], "b": [6], "c": [7]}))
    found.collect([], ["a"], False)
    runner.execute_model(chosen({"c": [8]}))  # its first rows are on their way still: it was aborted and made again
    assert collected(found, "a", "b", "c") == {"b": [[6], [8]], "c": [[8], [10]]}
    assert not found._rows


def test_a_request_preempted_in_the_middle_starts_over(runner: Runner) -> None:
    found = tap(runner, 1)
    runner.execute_model(chosen({"a": [5, 6]}, prompts={"a": [5, 6, 7, 8]}))
    runner.execute_model(chosen({}, {"a": (2, [7])}))
    runner.execute_model(chosen({"b": [1]}))
    runner.execute_model(chosen({}, {"a": (0, [5])}))
    runner.execute_model(chosen({}, {"a": (1, [6, 7, 8])}))
    assert collected(found, "a") == {"a": [[5, 6, 7, 8], [7, 8, 9, 10]]}


class Double(Layer):
    """Puts out float64, as a model does that keeps its residual stream in a wider type."""

    def forward(self, hidden: Any, residual: Any) -> Any:
        hidden, residual = super().forward(hidden, residual)
        return hidden, residual.double()


def test_layers_that_differ_in_dtype_keep_their_own(runner: Runner) -> None:
    runner.model.layers[1] = Double()
    found = tap(runner, 2, 0, "norm", 1)
    for _ in range(2):
        runner.execute_model(chosen({"a": [5, 6], "b": [7]}))
    (kept,) = found.collect(["a"], [], True)[1].values()
    assert isinstance(kept, tuple)
    assert [s.dtype for s in kept[1]] == [torch.float64, torch.float32, torch.float64, torch.float64]
    assert [s[:, 0].tolist() for s in kept[1]] == [[8, 9], [6, 7], [-8, -9], [7, 8]]
    assert all(s.is_contiguous() and s.untyped_storage().nbytes() == s.numel() * s.element_size() for s in kept[1])


def test_a_layer_that_changes_its_dtype_is_a_fault(runner: Runner) -> None:
    found = tap(runner, 1)
    runner.execute_model(chosen({"a": [5]}))
    runner.model.layers[0] = Double()
    runner.execute_model(chosen({}, {"a": (1, [6])}))
    fault, rows = found.collect(["a"], [], True)
    assert rows == {}
    assert fault is not None
    assert re.search(r"were .*float32.*, and are .*float64.* in this pass", fault)


def test_a_state_after_the_norm_that_is_none_is_refused_with_what_it_was(runner: Runner) -> None:
    runner.model.forward = lambda input_ids: torch.zeros(2, 2, 3)
    tap(runner, "norm")
    with pytest.raises(TypeError, match=r"model Model returns \(\[2, 2, 3\]\); wanted a tensor \[rows, hidden_size\]"):
        runner.execute_model(chosen({"a": [5, 6]}))


@pytest.mark.parametrize(
    ("spoiled", "words"),
    [
        ({"order": ["a"]}, r"the runner's batch holds \['a'\], the scheduler chose \['a', 'b'\]"),
        ({"order": ["a", "b", "c"]}, r"the runner's batch holds \['a', 'b', 'c'\]"),
        ({"passes": 2}, "layer 1 gave 2 states in one forward pass, wanted 1"),
        ({"passes": 0}, "layer 1 gave 0 states in one forward pass, wanted 1"),
        ({"padding": -1}, "layer 1 gave 2 rows for 3 tokens"),
    ],
)
def test_rows_that_cannot_be_given_to_their_owners_are_a_fault(
    spoiled: dict[str, Any], words: str, runner: Runner
) -> None:
    found = tap(runner, 1)
    vars(runner).update(spoiled)
    runner.execute_model(chosen({"a": [5, 6], "b": [7]}))
    fault, rows = found.collect(["a", "b"], [], True)
    assert rows == {}
    assert fault is not None
    assert re.search(words, fault)


def test_tokens_that_were_not_forwarded_here_are_a_fault(runner: Runner) -> None:
    found = tap(runner, 1)
    runner.execute_model(chosen({"a": [5, 6]}))
    runner.execute_model(chosen({}, {"a": (5, [7])}))
    fault, rows = found.collect(["a"], [], True)
    assert rows == {}
    assert fault is not None
    assert fault.startswith("request 'a': tokens 2 to 5 were not forwarded here")


def test_a_fault_stays_whatever_comes_after(runner: Runner) -> None:
    found = tap(runner, 1)
    runner.order = ["b"]
    runner.execute_model(chosen({"a": [5]}))
    runner.order = None
    runner.execute_model(chosen({"b": [6]}))
    assert found.collect(["b"], [], True) == found.collect([], [], True)
    assert found.collect(["b"], [], True)[0] is not None


def test_a_step_before_the_last_was_sampled_is_an_error(runner: Runner) -> None:
    tap(runner, 1)
    runner.execute_model_state = ("a batch",)
    with pytest.raises(RuntimeError, match=re.escape(PENDING)):
        runner.execute_model(chosen({"a": [5]}))


def test_an_error_of_the_model_comes_through_and_the_next_step_is_captured(runner: Runner) -> None:
    found = tap(runner, 0, 1)
    runner.by_keyword = None
    with pytest.raises(TypeError, match="input_ids"):
        runner.execute_model(chosen({"a": [5]}))
    runner.by_keyword = True
    runner.execute_model(chosen({"a": [5]}))
    assert collected(found, "a") == {"a": [[5], [6], [7]]}


def test_removing_a_tap_leaves_model_and_runner_as_they_were(runner: Runner) -> None:
    before = dict(vars(runner)), set(vars(runner.model))
    found = tap(runner, 0, 2, "norm")
    assert "execute_model" in vars(runner)
    found.remove()
    found.remove()
    assert (dict(vars(runner)), set(vars(runner.model))) == before
    assert not any(layer._forward_hooks for layer in runner.model.layers)
    runner.execute_model(chosen({"a": [5]}))
    assert found.collect(["a"], [], True) == (None, {})


def test_two_taps_one_after_the_other(runner: Runner) -> None:
    tap(runner, 0).remove()
    found = tap(runner, 1)
    runner.execute_model(chosen({"a": [5]}))
    assert collected(found, "a") == {"a": [[5], [7]]}


def test_a_runner_of_an_unknown_kind_is_refused(runner: Runner) -> None:
    del runner.input_batch
    with pytest.raises(
        UnsupportedModelError, match=r"Runner keeps its batch in a way none of persistent-batch, sorted"
    ):
        tap(runner, 0)


# the decoder layers


def test_the_decoder_layers_are_the_list_beside_the_vocabulary_s_embedding(runner: Runner) -> None:
    class Tower(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList([Layer() for _ in range(NUM_LAYERS)])

    whole = torch.nn.ModuleDict({"vision": Tower(), "language": runner.model})
    assert find_decoder_layers(whole, NUM_LAYERS) is runner.model.layers
    assert find_decoder_layers(Tower(), NUM_LAYERS) is not None


@pytest.mark.parametrize(("num_layers", "found"), [(7, "found none"), (NUM_LAYERS, "found one, two")])
@pytest.mark.usefixtures("runner")
def test_layers_that_cannot_be_told_apart_are_refused(num_layers: int, found: str) -> None:
    layers = [torch.nn.ModuleList([Layer() for _ in range(NUM_LAYERS)]) for _ in range(2)]
    model = torch.nn.ModuleDict(dict(zip(["one", "two"], layers, strict=True)))
    with pytest.raises(UnsupportedModelError, match=found):
        find_decoder_layers(model, num_layers)


# sharing


START = [*range(20, 36)]
"""Sixteen tokens."""


def sharing(new: dict[str, tuple[int, list[int]]], going: dict[str, tuple[int, list[int]]] | None = None) -> Any:
    """``new``: request id -> how many of its tokens a cache has, and all of them."""
    return chosen(
        {i: tokens[cached:] for i, (cached, tokens) in new.items()},
        going,
        {i: tokens for i, (_, tokens) in new.items()},
        {i: cached for i, (cached, _) in new.items()},
    )


def rows_of(tokens: list[int]) -> list[list[int]]:
    return [tokens, [t + 2 for t in tokens]]


@pytest.mark.parametrize("order", [["a", "b", "c"], ["c", "b", "a"]])
def test_a_beginning_that_the_cache_had_is_taken_from_who_forwarded_it(runner: Runner, order: list[str]) -> None:
    """In the very pass, whatever the order of its rows; and of one that began with another's rows itself."""
    found = tap(runner, 1, shares=True)
    runner.order = order
    a, b, c = START, [*START, 1, 2], [*START, 41, 42, 43]
    runner.execute_model(sharing({"a": (0, a), "b": (16, b), "c": (16, c)}))
    runner.order = None
    d = [*c[:18], 7]
    runner.execute_model(sharing({"d": (18, d)}))
    assert collected(found, "d", "b", "a", "c") == {i: rows_of(t) for i, t in zip("dbac", (d, b, a, c), strict=True)}


def test_rows_stay_for_others_until_they_are_retired(runner: Runner) -> None:
    found = tap(runner, 1, shares=True)
    runner.execute_model(sharing({"a": (0, [*START, 1])}))
    assert collected(found, "a") == {"a": rows_of([*START, 1])}
    runner.execute_model(sharing({"b": (16, [*START, 2])}))
    assert collected(found, "b") == {"b": rows_of([*START, 2])}
    found.collect([], [], True, ["a", "b"])
    runner.execute_model(sharing({"c": (16, [*START, 3])}))
    fault, rows = found.collect(["c"], [], True)
    assert fault is not None
    assert "'c': tokens 0 to 16 were not forwarded here" in fault
    assert rows == {}


def test_an_aborted_request_s_rows_are_there_for_others(runner: Runner) -> None:
    found = tap(runner, 1, shares=True)
    runner.execute_model(sharing({"a": (0, [*START, 1]), "z": (0, [5])}))
    found.collect([], ["a"], False)
    runner.execute_model(sharing({"b": (16, [*START, 2])}))
    assert collected(found, "b") == {"b": rows_of([*START, 2])}


def test_an_answer_is_a_beginning_too(runner: Runner) -> None:
    found = tap(runner, 1, shares=True)
    runner.execute_model(sharing({"a": (0, START[:14])}))
    runner.execute_model(sharing({}, {"a": (14, [START[14]])}))
    runner.execute_model(sharing({"b": (16, [*START, 9])}, {"a": (15, [START[15]])}))  # of this very pass
    assert collected(found, "a", "b") == {"a": rows_of(START), "b": rows_of([*START, 9])}


def test_an_id_that_is_used_again_does_not_hide_the_rows_of_before(runner: Runner) -> None:
    found = tap(runner, 1, shares=True)
    runner.execute_model(sharing({"a": (0, [*START, 1])}))
    collected(found, "a")
    runner.execute_model(sharing({"a": (0, [5, 6])}))
    collected(found, "a")
    found.collect([], [], True, ["unknown"])
    runner.execute_model(sharing({"a": (16, [*START, 2])}))
    assert collected(found, "a") == {"a": rows_of([*START, 2])}
    found.collect([], [], True, ["a"])  # the first of them
    assert [entry.token_ids for entry in found._shared._entries.values()] == [[5, 6], [*START, 2]]  # type: ignore[union-attr]


def test_a_preempted_request_goes_on_where_another_has_come_meanwhile(runner: Runner) -> None:
    """Both begin alike; the one is put off after four tokens, and comes back with sixteen in the cache."""
    found = tap(runner, 1, shares=True)
    a, b = [*START, 1], [*START, 2, 3]
    runner.execute_model(chosen({"a": a[:4], "b": b[:1]}, prompts={"a": a, "b": b}))
    runner.execute_model(sharing({}, {"b": (1, b[1:])}))
    runner.execute_model(sharing({}, {"a": (16, a[16:])}))
    assert collected(found, "a", "b") == {"a": rows_of(a), "b": rows_of(b)}


def test_a_request_that_is_to_be_filled_is_nobody_s_source(runner: Runner) -> None:
    """Two that go on in the same pass with another's rows: the second must not take them from the first's gap."""
    found = tap(runner, 1, shares=True)
    a, b, c = [*START, 1], [*START, 2], [*START, 3]
    runner.execute_model(chosen({"c": c[:2], "b": b[:2], "a": a}, prompts={"a": a, "b": b, "c": c}))
    runner.execute_model(sharing({}, {"b": (16, b[16:]), "c": (16, c[16:])}))
    assert collected(found, "a", "b", "c") == {"a": rows_of(a), "b": rows_of(b), "c": rows_of(c)}


def test_other_tokens_with_the_same_hash_are_no_beginning(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_compat._capture.shared._hashes", lambda ids: [1] * (len(ids) // 16))
    found = tap(runner, 1, shares=True)
    runner.execute_model(sharing({"x": (0, [9] * 16), "a": (0, START)}))
    runner.execute_model(sharing({"b": (16, [*START, 2])}))
    assert collected(found, "b") == {"b": rows_of([*START, 2])}


def test_without_sharing_a_cached_beginning_is_a_fault(runner: Runner) -> None:
    found = tap(runner, 1)
    runner.execute_model(sharing({"a": (0, START)}))
    runner.execute_model(sharing({"b": (16, [*START, 2])}))
    fault, _ = found.collect(["b"], [], True)
    assert fault is not None
    assert "tokens 0 to 16 were not forwarded here" in fault
