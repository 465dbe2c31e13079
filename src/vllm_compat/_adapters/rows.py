"""Which rows of a forward pass are whose. Runs in the worker.

The order is never that of submission: the V1 runner reuses the places of finished requests, the V2 runner sorts by
token count. Only the runner's own list of request ids says it, read right after the pass.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from vllm_compat._adapters.base import Behaviour
from vllm_compat._detect.need import Need

__all__ = ["BEHAVIOURS", "PersistentBatch", "RowOwners", "SortedBatch", "first_position"]

_SCHEDULED = (
    Need("vllm.v1.core.sched.output:SchedulerOutput.num_scheduled_tokens"),
    Need("vllm.v1.core.sched.output:SchedulerOutput.total_num_scheduled_tokens"),
    Need("vllm.v1.core.sched.output:NewRequestData.num_computed_tokens"),
    Need("vllm.v1.core.sched.output:CachedRequestData.num_computed_tokens"),
)


class RowOwners(Behaviour):
    """Who owns the rows of the pass that a runner has just made."""

    variation = "rows"

    @abstractmethod
    def serves(self, runner: Any) -> bool:
        """Whether this live runner is of the kind."""

    @abstractmethod
    def request_ids(self, runner: Any) -> Sequence[str]:
        """Request ids in the order of their rows."""

    @abstractmethod
    def token_ids(self, runner: Any) -> Any:
        """The runner's own buffer of input token ids, [at least the rows]; for a model that was given embeddings."""


class PersistentBatch(RowOwners):
    """The V1 runner: a batch that lives across steps, on the CPU and by default on GPUs up to 0.24."""

    name = "persistent-batch"
    needs: ClassVar = (
        *_SCHEDULED,
        Need("vllm.v1.worker.gpu_input_batch:InputBatch.req_ids"),
        Need("vllm.v1.worker.gpu_worker:Worker"),
    )

    def serves(self, runner: Any) -> bool:
        return hasattr(getattr(runner, "input_batch", None), "req_ids")

    def request_ids(self, runner: Any) -> Sequence[str]:
        ids: Sequence[str] = runner.input_batch.req_ids
        return ids

    def token_ids(self, runner: Any) -> Any:
        return runner.input_ids.gpu


class SortedBatch(RowOwners):
    """The V2 runner: a batch made anew for each step, kept until it is sampled. Its state was a tuple before 0.18."""

    name = "sorted-batch"
    needs: ClassVar = (*_SCHEDULED, Need("vllm.v1.worker.gpu.input_batch:InputBatch.req_ids"))

    def serves(self, runner: Any) -> bool:
        return hasattr(runner, "req_states")

    def request_ids(self, runner: Any) -> Sequence[str]:
        ids: Sequence[str] = self._batch(runner).req_ids
        return ids

    def token_ids(self, runner: Any) -> Any:
        return self._batch(runner).input_ids

    def _batch(self, runner: Any) -> Any:
        state = runner.execute_model_state
        if hasattr(state, "input_batch"):
            return state.input_batch
        return next(part for part in state or () if hasattr(part, "req_ids"))


def first_position(scheduler_output: Any) -> dict[str, int]:
    """Request id -> position of the first token that this step forwards for it.

    A preempted request starts over, so its position may go back.
    """
    cached = scheduler_output.scheduled_cached_reqs
    starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return starts | {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}


BEHAVIOURS: tuple[type[RowOwners], ...] = (PersistentBatch, SortedBatch)
