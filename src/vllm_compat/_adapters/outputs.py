"""What an update of the scheduler returns."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

from vllm_compat._adapters.base import Behaviour
from vllm_compat._detect.need import Need

__all__ = ["BEHAVIOURS", "ByValue", "RequestOutput", "UpdateReader"]


class RequestOutput(NamedTuple):  # made for every request in every step, and twice as fast as a frozen dataclass
    """One request's part of a step, in plain types; ``finish_reason`` is None while it goes on."""

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: str | None


class UpdateReader(Behaviour):
    """How the value of ``Scheduler.update_from_output`` is read."""

    variation = "outputs"

    @abstractmethod
    def read(self, update: Any) -> Iterator[RequestOutput]:
        """Every request's output, of every client."""


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

    def read(self, update: Any) -> Iterator[RequestOutput]:
        clients = update.values() if isinstance(update, Mapping) else [update] if update is not None else []
        for client in clients:
            for output in client.outputs:
                reason = output.finish_reason
                yield RequestOutput(
                    output.request_id,
                    tuple(map(int, output.new_token_ids)),
                    None if reason is None else str(reason),
                )


BEHAVIOURS: tuple[type[UpdateReader], ...] = (ByValue,)
