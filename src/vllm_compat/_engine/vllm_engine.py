"""An ``Engine`` over vLLM's real scheduler and executor."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from vllm_compat._adapters.outputs import UpdateReader
from vllm_compat._adapters.registry import Adapter, named
from vllm_compat._adapters.request import RequestFactory
from vllm_compat._adapters.step import PENDING, Step
from vllm_compat._engine.capture import Capture
from vllm_compat._engine.cores import Cores
from vllm_compat._engine.epochs import Epochs
from vllm_compat._requests import check_request
from vllm_compat.engine import Engine
from vllm_compat.errors import (
    EngineClosedError,
    PendingStepError,
    RequestError,
    StalledStepError,
    StepError,
)
from vllm_compat.types import CapturedStates, LayerId, StepResult

__all__ = ["VllmEngine"]

_ENDED_WELL = frozenset({"stop", "length", "repetition"})


@dataclass(slots=True)
class _Tracked:
    """A request between ``make_request`` and the collection of its states."""

    token_ids: tuple[int, ...]
    output_token_ids: list[int] = field(default_factory=list[int])
    finish_reason: str | None = None


class VllmEngine(Engine):
    """Built by ``_engine.build``; ``shut_down`` is None when the caller owns scheduler and executor.

    With ``shared_states_bytes`` requests that begin alike share cached tokens and their states, of which twice so many
    bytes are kept at most, beside those of the requests under way.
    """

    def __init__(
        self,
        *,
        adapter: Adapter,
        core: Any,
        scheduler: Any,
        executor: Any,
        layer_ids: tuple[LayerId, ...],
        shut_down: Callable[[], None] | None,
        shared_states_bytes: int = 0,
        cores: Cores | None = None,
    ) -> None:
        model_config = scheduler.vllm_config.model_config
        self.layer_ids = layer_ids
        self.num_layers = model_config.hf_text_config.num_hidden_layers
        self.hidden_size = model_config.get_hidden_size()
        self.vocab_size = model_config.get_vocab_size()
        self.max_model_len = scheduler.max_model_len
        self._scheduler: Any = scheduler
        self._executor: Any = executor
        self._shut_down = shut_down
        self._cores = cores or Cores()
        self._factory: RequestFactory = named("request", adapter.chosen["request"][0])
        self._step: Step = named("step", adapter.chosen["step"][0])
        self._reader: UpdateReader = named("outputs", adapter.chosen["outputs"][0])
        self._block_hasher: Any = self._factory.block_hasher(core, scheduler)
        self._end_token_ids = _end_token_ids(model_config)
        self._tracked: dict[str, _Tracked] = {}
        self._strangers: list[str] = []
        self._numbers = itertools.count()
        self._idle_since: float | None = None
        self._patience = 10.0  # seconds that a scheduler may choose nothing though requests wait, e.g. for a grammar
        self._failure: BaseException | None = None
        self._closed = False
        self._epochs: Epochs | None = None
        if layer_ids and shared_states_bytes:
            self._epochs = Epochs(
                shared_states_bytes // (len(layer_ids) * self.hidden_size * model_config.dtype.itemsize)
            )
        shares = self._epochs is not None
        self._capture = (
            Capture(executor, scheduler.vllm_config, layer_ids, adapter, shares=shares) if layer_ids else None
        )

    def make_request(
        self,
        token_ids: Sequence[int],
        *,
        request_id: str | None = None,
        max_tokens: int = 1,
        sampling: Mapping[str, Any] | None = None,
        ignore_eos: bool = False,
        add: bool = True,
    ) -> Any:
        self._require_open()
        if request_id is None:
            request_id = next(i for n in self._numbers if (i := f"request-{n}") not in self._tracked)
        ids = check_request(
            token_ids,
            request_id,
            max_tokens,
            taken=self._tracked,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
        )
        params = self._sampling_params(request_id, max_tokens, sampling, ignore_eos)
        salt = self._epochs.salt(request_id, len(ids) + max_tokens) if self._epochs else None
        try:
            request = self._factory.make(request_id, ids, params, self._block_hasher, salt)
            if add:
                self._scheduler.add_request(request)
        except BaseException:
            if self._epochs:
                self._epochs.end(request_id)
            raise
        self._tracked[request_id] = _Tracked(ids)
        return request

    def run_step(self, meanwhile: Callable[[], None] | None = None) -> StepResult:
        self._require_open()
        if not self._scheduler.has_requests():
            return StepResult()
        troubles: list[BaseException] = []

        def aside() -> None:
            try:
                if meanwhile:
                    meanwhile()
            except BaseException as error:
                if self._closed:  # by this very error
                    raise
                troubles.append(error)

        try:
            with self._cores.bound():
                result = self._advance(aside)
                # Finished requests reach the workers with the next step; there is none to wait for when all are done.
                if not self._scheduler.has_unfinished_requests() and self._scheduler.has_requests():
                    self._advance()
        except BaseException as error:
            if error is self._failure:
                raise
            self._fail(error)
            if PENDING in str(error):
                raise PendingStepError from error
            if isinstance(error, StepError) or not isinstance(error, Exception):
                raise
            raise StepError(
                f"a step failed inside vLLM: {type(error).__name__}: {error}. The engine is closed; its "
                f"{len(self._tracked)} request(s) are lost and can be made again in a new one."
            ) from error
        if troubles:
            raise troubles[0]
        return result

    def get_captured_states(self, *, wait: bool = True) -> list[CapturedStates]:
        self._require_open()
        finished = {i: t for i, t in self._tracked.items() if t.finish_reason is not None}
        good = {i: t for i, t in finished.items() if t.finish_reason in _ENDED_WELL}
        states: Mapping[str, Sequence[Any]] = dict.fromkeys(good, ())
        retired = self._epochs.retired() if self._epochs else []
        if self._capture and (finished or self._strangers or retired):
            # An aborted id that was made again keeps its rows: those of the new request have replaced the old ones.
            dropped = [*(i for i in finished if i not in good), *(i for i in self._strangers if i not in self._tracked)]
            wanted = {i: (*t.token_ids, *t.output_token_ids[:-1]) for i, t in good.items()}
            try:
                states = self._capture.collect(wanted, dropped, wait, retired)
            except BaseException as error:
                self._fail(error)
                raise
        self._strangers.clear()
        for request_id in finished:
            if request_id in states or request_id not in good:
                self._forget(request_id)
        return [
            CapturedStates(
                request_id=request_id,
                token_ids=(*t.token_ids, *t.output_token_ids[:-1]),
                num_prompt_tokens=len(t.token_ids),
                output_token_ids=tuple(t.output_token_ids),
                layer_ids=self.layer_ids,
                hidden_states=tuple(states[request_id]),
                finish_reason=t.finish_reason or "",
            )
            for request_id, t in good.items()
            if request_id in states
        ]

    def abort(self, *request_ids: str) -> None:
        self._require_open()
        from vllm.v1.request import RequestStatus

        going_on = [i for i in request_ids if i in self._tracked and self._tracked[i].finish_reason is None]
        self._scheduler.finish_requests(going_on, RequestStatus.FINISHED_ABORTED)
        for request_id in going_on:
            self._forget(request_id)
            if self._capture:
                self._strangers.append(request_id)

    @property
    def has_unfinished(self) -> bool:
        return not self._closed and bool(self._scheduler.has_unfinished_requests())

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._shut_down:
            shut_down = self._shut_down
            # A closed engine that somebody still holds must not hold the model's memory.
            self._scheduler = self._executor = self._capture = self._block_hasher = self._shut_down = None
            shut_down()  # the taps go with the workers, which after a failure may not even answer
        elif self._capture:
            self._capture.remove()

    def _forget(self, request_id: str) -> None:
        del self._tracked[request_id]
        if self._epochs:
            self._epochs.end(request_id)

    def _advance(self, meanwhile: Callable[[], None] = lambda: None) -> StepResult:
        scheduler_output = self._scheduler.schedule()
        self._require_progress(scheduler_output)
        output = self._step.execute(self._executor, self._scheduler, scheduler_output, meanwhile)
        sampled, finished = self._reader.read(self._scheduler.update_from_output(scheduler_output, output))
        for request_id, token_ids in sampled.items():
            if tracked := self._tracked.get(request_id):
                tracked.output_token_ids += token_ids
        for request_id, reason in finished.items():
            if tracked := self._tracked.get(request_id):
                tracked.finish_reason = reason
            elif self._capture:
                self._strangers.append(request_id)
        return StepResult(
            MappingProxyType(dict(scheduler_output.num_scheduled_tokens)),
            MappingProxyType(sampled),
            MappingProxyType(finished),
        )

    def _require_progress(self, scheduler_output: Any) -> None:
        if scheduler_output.total_num_scheduled_tokens or not self._scheduler.has_unfinished_requests():
            self._idle_since = None
            return
        now = time.monotonic()
        self._idle_since = self._idle_since or now
        if now - self._idle_since > self._patience:
            waiting = [i for i, t in self._tracked.items() if t.finish_reason is None]
            raise StalledStepError(
                waiting,
                f"the scheduler has chosen nothing for {self._patience:.0f} s. Either a step was executed outside "
                "run_step() and its result never given to update_from_output(), or the KV cache cannot hold even one "
                "of them (raise gpu_memory_utilization, or lower max_model_len or max_num_seqs), or the scheduler is "
                "paused.",
            )
        time.sleep(0.005)

    def _sampling_params(
        self, request_id: str, max_tokens: int, sampling: Mapping[str, Any] | None, ignore_eos: bool
    ) -> Any:
        from vllm.sampling_params import SamplingParams

        options: dict[str, Any] = {"temperature": 0.0, "detokenize": False, **(sampling or {})}
        stop = set(options.pop("stop_token_ids", None) or ()) | (set() if ignore_eos else self._end_token_ids)
        try:
            return SamplingParams(max_tokens=max_tokens, stop_token_ids=sorted(stop), ignore_eos=ignore_eos, **options)
        except (TypeError, ValueError) as error:
            raise RequestError(
                f"sampling options {options} are refused by vLLM: {error}", request_id=request_id
            ) from error

    def _require_open(self) -> None:
        if self._closed:
            reason = f" because of {type(self._failure).__name__}: {self._failure}" if self._failure else ""
            raise EngineClosedError(f"the engine was closed{reason}") from self._failure

    def _fail(self, error: BaseException) -> None:
        """Close after a failure, whose message is worth more than anything that goes wrong on the way out."""
        self._failure = error
        try:
            self.close()
        except Exception as another:
            error.__context__ = another


def _end_token_ids(model_config: Any) -> set[int]:
    """The ids that end an answer, as the model's generation config or its config names them."""
    generation = model_config.try_get_generation_config() or {}
    ids = generation.get("eos_token_id", getattr(model_config.hf_text_config, "eos_token_id", None))
    if ids is None:
        return set()
    return {ids} if isinstance(ids, int) else set(ids)
