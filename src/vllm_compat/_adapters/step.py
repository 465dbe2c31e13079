"""Whether a step is one call to the executor or two."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from vllm_compat._adapters.base import Behaviour
from vllm_compat._detect.need import Need

__all__ = ["BEHAVIOURS", "PENDING", "OnePhase", "Step", "TwoPhase", "is_pending"]

PENDING = "sample_tokens() must be called after execute_model() returns None"
"""How vLLM's V1 runner words a missing second phase; the tap says the same where V2 says nothing."""

_SAMPLE_TOKENS = Need("vllm.v1.executor.abstract:Executor.sample_tokens")
_ALWAYS = (
    Need("vllm.v1.engine.core:EngineCore.__init__", ("vllm_config", "executor_class", "log_stats")),
    Need("vllm.v1.engine.core:EngineCore.scheduler"),
    Need("vllm.v1.engine.core:EngineCore.model_executor"),
    Need("vllm.v1.engine.core:EngineCore.shutdown"),
    Need("vllm.engine.arg_utils:EngineArgs.create_engine_config"),
    Need("vllm.engine.arg_utils:EngineArgs.enforce_eager"),
    Need("vllm.engine.arg_utils:EngineArgs.worker_extension_cls"),
    Need("vllm.v1.executor.abstract:Executor.get_class"),
    Need("vllm.v1.executor.abstract:Executor.execute_model"),
    Need("vllm.v1.executor.abstract:Executor.collective_rpc", ("method", "args")),
    Need("vllm.v1.core.sched.scheduler:Scheduler.schedule", supplied=frozenset()),
    Need("vllm.v1.core.sched.scheduler:Scheduler.add_request", ("request",)),
    Need("vllm.v1.core.sched.scheduler:Scheduler.finish_requests"),
    Need("vllm.v1.core.sched.scheduler:Scheduler.has_requests"),
    Need("vllm.v1.core.sched.scheduler:Scheduler.has_unfinished_requests"),
)


class Step(Behaviour):
    """How a scheduled step is executed."""

    variation = "step"

    @abstractmethod
    def execute(self, executor: Any, scheduler: Any, scheduler_output: Any, meanwhile: Callable[[], None]) -> Any:
        """Forward and sample what the scheduler chose; returns vLLM's ``ModelRunnerOutput``.

        Args:
            executor: vLLM's.
            scheduler: vLLM's.
            scheduler_output: what it chose.
            meanwhile: called once, while the device is at work wherever the step lets us.
        """


class OnePhase(Step):
    """``execute_model`` forwards and samples. Goes when 0.11.0 does."""

    name = "one-phase"
    needs: ClassVar = _ALWAYS
    unless: ClassVar = (_SAMPLE_TOKENS,)

    def execute(self, executor: Any, scheduler: Any, scheduler_output: Any, meanwhile: Callable[[], None]) -> Any:
        output = _resolve(executor.execute_model(scheduler_output))
        meanwhile()
        return output


class TwoPhase(Step):
    """``execute_model`` forwards and returns None; ``sample_tokens`` must then follow, once.

    A step with nothing to forward answers in the first call. Since 0.11.1.
    """

    name = "two-phase"
    needs: ClassVar = (
        *_ALWAYS,
        _SAMPLE_TOKENS,
        Need("vllm.v1.core.sched.scheduler:Scheduler.get_grammar_bitmask", ("scheduler_output",)),
    )

    def execute(self, executor: Any, scheduler: Any, scheduler_output: Any, meanwhile: Callable[[], None]) -> Any:
        output = _resolve(executor.execute_model(scheduler_output))
        meanwhile()  # the forward pass is queued, and sampling will wait for it
        if output is None:
            output = _resolve(executor.sample_tokens(scheduler.get_grammar_bitmask(scheduler_output)))
        return output


def _resolve(output: Any) -> Any:
    """Wait for a future, and for an output whose copy to the host is still under way.

    Which of the two comes depends on executor, runner and release: before 0.24 the in-process executor hands out the
    unresolved output even when asked to block.
    """
    if hasattr(output, "add_done_callback"):
        output = output.result()
    if hasattr(output, "get_output"):
        output = output.get_output()
    return output


def is_pending(runner: Any) -> bool:
    """Whether a worker's runner waits for ``sample_tokens``; always False where steps have one phase."""
    return getattr(runner, "execute_model_state", None) is not None


BEHAVIOURS: tuple[type[Step], ...] = (TwoPhase, OnePhase)
