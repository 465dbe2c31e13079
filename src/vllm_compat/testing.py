"""A fake engine with the real one's interface and no torch, for the tests of code that drives an ``Engine``.

It schedules like vLLM does where a caller can tell: a token budget that cuts prompts into pieces, finished requests
reported in an order of their own, states that come only after the end, and without waiting a step later still. Every
row of its states follows from the layer id and the tokens up to that row alone, so a test can say what any row must be:
see ``fake_row``.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_compat._layers import check_layer_ids
from vllm_compat._requests import check_request
from vllm_compat.engine import Engine
from vllm_compat.errors import EngineClosedError, StepError
from vllm_compat.types import CapturedStates, LayerId, StepResult

__all__ = ["FakeEngine", "FakeRequest", "fake_row"]


def fake_row(layer_id: LayerId, token_ids: Sequence[int], hidden_size: int) -> list[float]:
    """The state of the last of ``token_ids`` at a layer: the same for the same layer and tokens, else different.

    Values are multiples of 1/128 in [-1, 1), exact in bfloat16.
    """
    seed = zlib.crc32(repr((layer_id, *token_ids)).encode())
    return [((seed := (seed * 1664525 + 1013904223) % 2**32) >> 24) / 128 - 1 for _ in range(hidden_size)]


@dataclass(slots=True)
class FakeRequest:
    """What ``FakeEngine.make_request`` returns, in the place of vLLM's ``Request``."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    end_token_ids: frozenset[int]
    num_computed_tokens: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    finished_at: int = 0

    @property
    def all_token_ids(self) -> tuple[int, ...]:
        """Prompt and sampled tokens."""
        return (*self.prompt_token_ids, *self.output_token_ids)


class FakeEngine(Engine):
    """An ``Engine`` of made-up states.

    Args:
        layer_ids, num_layers, hidden_size, vocab_size, max_model_len: as the attributes of ``Engine``.
        max_num_batched_tokens: the most tokens of one step.
        max_num_seqs: the most requests that are under way at once.
        eos_token_id: the sampled token that ends an answer.
        make_tensor: makes a tensor of the rows of one layer, a list [tokens][hidden_size]; ``numpy.array`` will do.
        fail_at_step: raise ``StepError`` in the step of this number (from 0) and close, as a real engine does.
    """

    def __init__(
        self,
        layer_ids: Sequence[LayerId] = (0,),
        *,
        num_layers: int = 4,
        hidden_size: int = 8,
        vocab_size: int = 1000,
        max_model_len: int = 4096,
        max_num_batched_tokens: int = 64,
        max_num_seqs: int = 16,
        eos_token_id: int = 0,
        make_tensor: Callable[[list[list[float]]], Any] = list,
        fail_at_step: int | None = None,
    ) -> None:
        self.layer_ids = check_layer_ids(layer_ids, num_layers)
        self.num_layers = num_layers
        self.hidden_size = hidden_size
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self._budget = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._eos_token_id = eos_token_id
        self._make_tensor = make_tensor
        self._fail_at_step = fail_at_step
        self._requests: dict[str, FakeRequest] = {}
        self._queue: list[FakeRequest] = []
        self._numbers = itertools.count()
        self._steps = 0
        self._failure: StepError | None = None
        self._closed = False

    def make_request(
        self,
        token_ids: Sequence[int],
        *,
        request_id: str | None = None,
        max_tokens: int = 1,
        sampling: Mapping[str, Any] | None = None,
        ignore_eos: bool = False,
        add: bool = True,
    ) -> FakeRequest:
        self._require_open()
        if request_id is None:
            request_id = next(i for n in self._numbers if (i := f"request-{n}") not in self._requests)
        ids = check_request(
            token_ids,
            request_id,
            max_tokens,
            taken=self._requests,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
        )
        stop = frozenset((sampling or {}).get("stop_token_ids") or ()) | (
            frozenset() if ignore_eos else {self._eos_token_id}
        )
        request = FakeRequest(request_id, ids, max_tokens, stop)
        self._requests[request_id] = request
        if add:
            self._queue.append(request)
        return request

    def run_step(self, meanwhile: Callable[[], None] | None = None) -> StepResult:
        self._require_open()
        if not self._queue:
            return StepResult()
        if self._steps == self._fail_at_step:
            self._closed = True
            self._failure = StepError("the fake engine was told to fail at this step")
            raise self._failure
        self._steps += 1
        budget = self._budget
        scheduled: dict[str, int] = {}
        for request in self._queue[: self._max_num_seqs]:
            count = min(budget, len(request.all_token_ids) - request.num_computed_tokens)
            if count:
                scheduled[request.request_id] = count
                budget -= count
        troubles = self._aside(meanwhile)
        sampled: dict[str, tuple[int, ...]] = {}
        for request_id, count in sorted(
            scheduled.items(), key=lambda item: item[1]
        ):  # like the V2 runner: not by arrival
            if token := self._forward(self._requests[request_id], count):
                sampled[request_id] = token
        finished = {i: r.finish_reason for i in sampled if (r := self._requests[i]).finish_reason}
        for request_id in finished:
            self._requests[request_id].finished_at = self._steps
        self._queue = [r for r in self._queue if r.finish_reason is None]
        if troubles:
            raise troubles[0]
        return StepResult(scheduled, sampled, finished)

    def _aside(self, meanwhile: Callable[[], None] | None) -> list[BaseException]:
        """What it raised, for when the step is done; that which closed the engine at once."""
        try:
            if meanwhile:
                meanwhile()
        except BaseException as error:
            if self._closed:
                raise
            return [error]
        return []

    def get_captured_states(self, *, wait: bool = True) -> list[CapturedStates]:
        self._require_open()
        finished = [r for r in self._requests.values() if r.finish_reason and (wait or r.finished_at < self._steps)]
        for request in finished:
            del self._requests[request.request_id]
        return [self._states(r) for r in finished]

    def abort(self, *request_ids: str) -> None:
        self._require_open()
        for request_id in request_ids:
            if (request := self._requests.get(request_id)) and request.finish_reason is None:
                del self._requests[request_id]
                self._queue = [r for r in self._queue if r is not request]

    @property
    def has_unfinished(self) -> bool:
        return not self._closed and bool(self._queue)

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True

    def _require_open(self) -> None:
        if self._closed:
            raise EngineClosedError("the engine was closed") from self._failure

    def _forward(self, request: FakeRequest, count: int) -> tuple[int, ...]:
        """Forward ``count`` tokens; returns the sampled token once the whole sequence was forwarded."""
        request.num_computed_tokens += count
        if request.num_computed_tokens < len(request.all_token_ids):
            return ()
        token = zlib.crc32(repr(request.all_token_ids).encode()) % self.vocab_size
        request.output_token_ids.append(token)
        if token in request.end_token_ids:
            request.finish_reason = "stop"
        elif len(request.output_token_ids) == request.max_tokens or len(request.all_token_ids) == self.max_model_len:
            request.finish_reason = "length"
        return (token,)

    def _states(self, request: FakeRequest) -> CapturedStates:
        forwarded = request.all_token_ids[:-1]
        return CapturedStates(
            request_id=request.request_id,
            token_ids=forwarded,
            num_prompt_tokens=len(request.prompt_token_ids),
            output_token_ids=tuple(request.output_token_ids),
            layer_ids=self.layer_ids,
            hidden_states=tuple(
                self._make_tensor([fake_row(i, forwarded[: n + 1], self.hidden_size) for n in range(len(forwarded))])
                for i in self.layer_ids
            ),
            finish_reason=request.finish_reason or "",
        )
