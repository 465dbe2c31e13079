"""What an update of the scheduler returns."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from vllm_compat._adapters.base import Behaviour
from vllm_compat._detect.need import Need

__all__ = ["BEHAVIOURS", "ByValue", "UpdateReader"]


class UpdateReader(Behaviour):
    """How the value of ``Scheduler.update_from_output`` is read."""

    variation = "outputs"

    @abstractmethod
    def read(self, update: Any) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
        """Of every client's requests: the tokens sampled for each that got any, and why each that ended did.

        In plain types, and no object for each request: with 256 of them those were nearly half of our part of a step.
        """


class ByValue(UpdateReader):
    """A dictionary by client since 0.9.1, one object before; None when there is nothing."""

    name = "by-value"
    needs: ClassVar = (
        Need("vllm.v1.core.sched.scheduler:Scheduler.update_from_output", ("scheduler_output", "model_runner_output")),
        Need("vllm.v1.engine:EngineCoreOutputs.outputs"),
        Need("vllm.v1.engine:EngineCoreOutput.request_id"),
        Need("vllm.v1.engine:EngineCoreOutput.new_token_ids"),
        Need("vllm.v1.engine:EngineCoreOutput.finish_reason"),
    )

    def read(self, update: Any) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
        sampled: dict[str, tuple[int, ...]] = {}
        finished: dict[str, str] = {}
        clients = update.values() if isinstance(update, Mapping) else [update] if update is not None else []
        for client in clients:
            for output in client.outputs:
                token_ids = output.new_token_ids
                if len(token_ids):
                    # An array's elements are no ints.
                    found = tuple(token_ids if type(token_ids) is list else map(int, token_ids))
                    request_id = output.request_id
                    sampled[request_id] = sampled[request_id] + found if request_id in sampled else found
                if output.finish_reason is not None:
                    finished[output.request_id] = str(output.finish_reason)
        return sampled, finished


BEHAVIOURS: tuple[type[UpdateReader], ...] = (ByValue,)
