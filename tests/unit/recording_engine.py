"""A scheduler and an executor that record, for a real ``VllmEngine`` without vLLM.

The scheduler chooses like vLLM's where our engine can tell; tokens and states are those of ``FakeEngine``, so that one
test can ask both engines for the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from tests.unit.vllm_tree import write_vllm

from vllm_compat._adapters.registry import choose
from vllm_compat._capture.extension import EXTENSION, Answer
from vllm_compat._detect.surface import Surface
from vllm_compat._engine.vllm_engine import VllmEngine
from vllm_compat._layers import check_layer_ids
from vllm_compat.testing import fake_row
from vllm_compat.types import LayerId

NUM_LAYERS, HIDDEN_SIZE, VOCAB_SIZE, MAX_MODEL_LEN = 4, 8, 1000, 64


class Scheduler:
    """vLLM's, as far as the engine sees it: a token budget, and finished requests told to the workers a step later."""

    def __init__(self, budget: int, end_token_ids: Any) -> None:
        self.cache_config = SimpleNamespace(enable_prefix_caching=False)
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(
                model="some/model",
                runner_type="generate",
                is_encoder_decoder=False,
                enforce_eager=True,
                hf_text_config=SimpleNamespace(num_hidden_layers=NUM_LAYERS),
                get_hidden_size=lambda: HIDDEN_SIZE,
                get_vocab_size=lambda: VOCAB_SIZE,
                try_get_generation_config=lambda: {"eos_token_id": end_token_ids},
            ),
            cache_config=self.cache_config,
            parallel_config=SimpleNamespace(worker_extension_cls=EXTENSION, pipeline_parallel_size=1),
            scheduler_config=SimpleNamespace(async_scheduling=False),
            speculative_config=None,
        )
        self.max_model_len = MAX_MODEL_LEN
        self.budget = budget
        self.requests: dict[str, Any] = {}
        self.untold: list[str] = []
        self.aborted: list[list[str]] = []
        self.stuck = False

    def get_kv_connector(self) -> None:
        return None

    def add_request(self, request: Any) -> None:
        request.all_token_ids = list(request.given["prompt_token_ids"])
        request.num_computed_tokens = request.num_sampled = 0
        self.requests[request.request_id] = request

    def finish_requests(self, request_ids: Sequence[str], status: Any) -> None:
        assert status.name == "FINISHED_ABORTED"
        self.aborted.append(list(request_ids))
        for request_id in request_ids:
            del self.requests[request_id]
            self.untold.append(request_id)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def has_requests(self) -> bool:
        return bool(self.requests or self.untold)

    def schedule(self) -> Any:
        self.untold.clear()
        budget, counts, tokens, starts = self.budget, {}, {}, {}
        for request_id, request in {} if self.stuck else self.requests.items():
            start = request.num_computed_tokens
            if chosen := request.all_token_ids[start : start + budget]:
                counts[request_id], tokens[request_id], starts[request_id] = len(chosen), chosen, start
                budget -= len(chosen)
        total = sum(counts.values())
        return SimpleNamespace(
            num_scheduled_tokens=counts, total_num_scheduled_tokens=total, tokens=tokens, starts=starts
        )

    def get_grammar_bitmask(self, scheduler_output: Any) -> None:
        return None

    def update_from_output(self, scheduler_output: Any, output: Any) -> Any:
        assert output == ("sampled" if scheduler_output.tokens else "nothing to sample")
        outputs = []
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            request.num_computed_tokens += count
            if request.num_computed_tokens < len(request.all_token_ids):
                continue
            token, params, reason = next_token(request.all_token_ids), request.given["sampling_params"], None
            request.all_token_ids.append(token)
            request.num_sampled += 1
            if token in params.stop_token_ids:
                reason = "stop"
            elif request.num_sampled == params.max_tokens or len(request.all_token_ids) == MAX_MODEL_LEN:
                reason = "length"
            if reason:
                del self.requests[request_id]
                self.untold.append(request_id)
            outputs.append(SimpleNamespace(request_id=request_id, new_token_ids=[token], finish_reason=reason))
        return {0: SimpleNamespace(outputs=outputs)}


def next_token(token_ids: Sequence[int]) -> int:
    """The token that both ``FakeEngine`` and this module sample after ``token_ids``."""
    return zlib.crc32(repr(tuple(token_ids)).encode()) % VOCAB_SIZE


class Executor:
    """Two workers, the first of which captures; every call is recorded by name."""

    def __init__(self, layer_ids: Sequence[LayerId]) -> None:
        self.layer_ids = layer_ids
        self.calls: list[str] = []
        self.collected: list[tuple[list[str], list[str]]] = []
        self.forwarded: dict[str, list[int]] = {}
        self.late: set[str] = set()
        self.failure: BaseException | None = None

    def execute_model(self, scheduler_output: Any) -> Any:
        self.calls.append("execute_model")
        if self.failure:
            raise self.failure
        for request_id, tokens in scheduler_output.tokens.items():
            before = self.forwarded.get(request_id, [])[: scheduler_output.starts[request_id]]  # one made anew replaces
            self.forwarded[request_id] = before + tokens
        if not scheduler_output.tokens:
            return "nothing to sample"
        self.late = set(scheduler_output.tokens)  # their rows are ready once the next pass has run
        return None

    def sample_tokens(self, grammar_output: Any) -> Any:
        self.calls.append("sample_tokens")
        return "sampled"

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append(method)
        if method != "vllm_compat_collect":
            return [None, None]
        (order,) = args
        self.collected.append((order.finished, order.dropped))
        for request_id in order.dropped:
            self.forwarded.pop(request_id, None)
        late = set() if order.wait else self.late
        found = [i for i in order.finished if i in self.forwarded]
        return [Answer(None, {i: None if i in late else self._states(self.forwarded.pop(i)) for i in found}), None]

    def _states(self, ids: list[int]) -> Any:
        return np.array(ids), [
            np.array([fake_row(layer, ids[: n + 1], HIDDEN_SIZE) for n in range(len(ids))]) for layer in self.layer_ids
        ]


class Recorded(VllmEngine):
    """A ``VllmEngine`` that shows the two it drives."""

    scheduler: Scheduler
    executor: Executor


def recorded_engine(
    site: Path,
    layer_ids: Sequence[LayerId] = (0,),
    *,
    budget: int = 64,
    end_token_ids: Any = 0,
    shut_down: Callable[[], None] | None = None,
) -> Recorded:
    """A real engine over these two. ``import vllm`` must find the tree in ``site`` while it is used."""
    adapter = choose(Surface(write_vllm(site, importable=True)))
    scheduler, executor = Scheduler(budget, end_token_ids), Executor(layer_ids)
    engine = Recorded(
        adapter=adapter,
        core=None,
        scheduler=scheduler,
        executor=executor,
        layer_ids=check_layer_ids(layer_ids, NUM_LAYERS),
        shut_down=shut_down,
    )
    engine.__dict__.update(scheduler=scheduler, executor=executor)
    return engine
