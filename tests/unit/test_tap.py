"""The taps in a worker, on a small model and a runner that records: whose rows are whose, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.vllm_tree import importing, write_vllm

from vllm_compat import UnsupportedModelError
from vllm_compat._adapters.step import PENDING
from vllm_compat._capture.layers import find_decoder_layers
from vllm_compat._capture.tap import Tap, _Rows

torch: Any = pytest.importorskip("torch")

NUM_LAYERS, HIDDEN_SIZE = 3, 4
EMBEDDING = "import torch\nclass VocabParallelEmbedding(torch.nn.Embedding): ...\n"


# the rows of one request


def piece(start: int, count: int, of: int = 0) -> tuple[int, Any, list[Any]]:
    """Rows ``start`` to ``start + count`` of a request; ``of`` marks them."""
    positions = torch.arange(start, start + count)
    return start, positions + of, [positions[:, None] * 1.0 + of, positions[:, None] * 10.0 + of]


def joined(rows: _Rows) -> list[list[float]]:
    ids, states = rows.joined()
    return [ids.tolist(), *(s[:, 0].tolist() for s in states)]


def positions(*numbers: int) -> list[list[float]]:
    return [list(numbers), [n * 1.0 for n in numbers], [n * 10.0 for n in numbers]]


@pytest.mark.parametrize("counts", [[5], [2, 3], [1, 1, 1, 2], [4, 1]])
def test_pieces_join_in_the_order_of_their_positions(counts: list[int]) -> None:
    rows, start = _Rows(), 0
    for count in counts:
        assert rows.put(*piece(start, count))
        start += count
        assert len(rows) == start
    assert joined(rows) == positions(0, 1, 2, 3, 4)


@pytest.mark.parametrize("before", [0, 3])
def test_a_gap_is_refused_and_changes_nothing(before: int) -> None:
    rows = _Rows()
    if before:
        rows.put(*piece(0, before))
    assert not rows.put(*piece(before + 1, 2))
    assert len(rows) == before
    assert rows.put(*piece(before, 2))
    assert joined(rows) == positions(*range(before + 2))


@pytest.mark.parametrize(
    ("start", "count"),
    [(0, 2), (0, 9), (1, 3), (2, 1), (3, 4), (4, 2), (5, 1), (6, 2)],
    ids=lambda n: str(n),
)
def test_rows_forwarded_again_after_preemption_replace_the_old_from_there_on(start: int, count: int) -> None:
    rows = _Rows()
    for old in (piece(0, 2), piece(2, 3), piece(5, 1)):
        rows.put(*old)
    assert rows.put(*piece(start, count, of=100))
    ids = [*range(start), *range(100 + start, 100 + start + count)]
    found = joined(rows)
    assert found[0] == ids
    assert found[1] == [float(i) for i in ids]
    assert len(rows) == len(ids) == start + count


def test_rows_are_copies_and_ordinary_tensors() -> None:
    rows = _Rows()
    batch = torch.zeros(100, 2)
    with torch.inference_mode():
        computed = batch + 1
        rows.put(0, torch.tensor([1, 2]), [computed[:2]])
        rows.put(2, torch.tensor([3]), [computed[2:3]])
        computed[:] = 9
    for held in (rows._pieces[0][2][0], rows._pieces[1][2][0]):
        assert held.untyped_storage().nbytes() == held.numel() * held.element_size()
        assert not held.is_inference()
    (states,) = rows.joined()[1]
    assert states.tolist() == [[1, 1]] * 3
    assert not states.is_inference()


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


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    path = "model_executor/layers/vocab_parallel_embedding.py"
    write_vllm(tmp_path, importable=True, add={path: EMBEDDING})
    with importing(tmp_path):
        yield Runner(Model())


def tap(runner: Runner, *layer_ids: Any) -> Tap:
    text_config = SimpleNamespace(num_hidden_layers=NUM_LAYERS)
    worker = SimpleNamespace(model_runner=runner, model_config=SimpleNamespace(hf_text_config=text_config))
    return Tap(worker, layer_ids, "layer-hooks")


def chosen(new: dict[str, list[int]], going: dict[str, tuple[int, list[int]]] | None = None) -> Any:
    """A scheduler's output: request id -> tokens of new ones, -> (position, tokens) of those that go on."""
    going = going or {}
    tokens = new | {i: t for i, (_, t) in going.items()}
    return SimpleNamespace(
        tokens=tokens,
        num_scheduled_tokens={i: len(t) for i, t in tokens.items()},
        total_num_scheduled_tokens=sum(map(len, tokens.values())),
        scheduled_new_reqs=[SimpleNamespace(req_id=i, num_computed_tokens=0) for i in new],
        scheduled_cached_reqs=SimpleNamespace(req_ids=list(going), num_computed_tokens=[p for p, _ in going.values()]),
    )


def collected(found: Tap, *finished: str) -> dict[str, list[list[int]]]:
    """Request id -> token ids, then the first column of each layer."""
    fault, rows = found.collect(finished, [])
    assert fault is None
    return {i: [ids.tolist(), *(s[:, 0].int().tolist() for s in states)] for i, (ids, states) in rows.items()}


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
    found.collect([], ["a", "never seen"])
    assert collected(found, "a", "b") == {"b": [[6], [8]]}


def test_steps_that_forward_nothing_of_a_request_s_leave_no_rows(runner: Runner) -> None:
    found = tap(runner, 1)
    assert runner.execute_model(chosen({})) == "nothing to do"
    runner.execute_model(chosen({"a": [5]}))
    runner.execute_model(chosen({"warm-up": [1, 2]}), dummy_run=True)
    runner.model(torch.tensor([3]))  # a forward pass outside of any step
    assert collected(found, "warm-up", "a") == {"a": [[5], [7]]}


def test_states_reach_the_host_in_the_model_s_own_type(runner: Runner) -> None:
    found = tap(runner, 1)
    runner.execute_model(chosen({"a": [5]}))
    ids, (states,) = found.collect(["a"], [])[1]["a"]
    assert (states.dtype, states.shape, states.device.type) == (torch.float32, (1, HIDDEN_SIZE), "cpu")
    assert (ids.shape, states.is_contiguous()) == ((1,), True)


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
    fault, rows = found.collect(["a", "b"], [])
    assert rows == {}
    assert fault is not None
    assert re.search(words, fault)


def test_tokens_that_were_not_forwarded_here_are_a_fault(runner: Runner) -> None:
    found = tap(runner, 1)
    runner.execute_model(chosen({"a": [5, 6]}))
    runner.execute_model(chosen({}, {"a": (5, [7])}))
    fault, rows = found.collect(["a"], [])
    assert rows == {}
    assert fault is not None
    assert fault.startswith("request 'a': tokens 2 to 5 were not forwarded here")


def test_a_fault_stays_whatever_comes_after(runner: Runner) -> None:
    found = tap(runner, 1)
    runner.order = ["b"]
    runner.execute_model(chosen({"a": [5]}))
    runner.order = None
    runner.execute_model(chosen({"b": [6]}))
    assert found.collect(["b"], []) == found.collect([], [])
    assert found.collect(["b"], [])[0] is not None


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
    assert found.collect(["a"], []) == (None, {})


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
