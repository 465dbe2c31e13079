"""The engine's side of the taps: puts them in, collects from them, checks what came."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_compat._adapters.registry import Adapter
from vllm_compat._capture.extension import EXTENSION, Answer, Order, VllmCompatExtension
from vllm_compat._capture.lending import Borrower, Lent
from vllm_compat._stacked import columns
from vllm_compat.errors import CaptureError, StepError, TokenMismatchError, UnsupportedModelError, VllmCompatError
from vllm_compat.types import LayerId

__all__ = ["Capture"]


class Capture:
    """Taps in every worker of an executor, from construction to ``remove``."""

    def __init__(
        self,
        executor: Any,
        vllm_config: Any,
        layer_ids: tuple[LayerId, ...],
        adapter: Adapter,
        *,
        shares: bool = False,
    ) -> None:
        self._executor = executor
        self._by_name = vllm_config.parallel_config.worker_extension_cls == EXTENSION
        self._layer_ids = layer_ids
        self._borrower = Borrower()
        try:
            how = adapter.chosen["states"][0]
            probes = self._call(VllmCompatExtension.vllm_compat_install, layer_ids, how, os.getpid(), shares)
            self._near = [probe.worker for probe in probes if self._borrower.reaches(probe)]
        except BaseException as error:
            self.remove()  # some workers may have succeeded
            if isinstance(error, VllmCompatError) or not isinstance(error, Exception):
                raise
            # A worker process sends back the text of its error alone.
            raise UnsupportedModelError(f"the model's layers could not be tapped: {error}") from error

    def collect(
        self, wanted: Mapping[str, Sequence[int]], dropped: Sequence[str], wait: bool, retired: Sequence[str] = ()
    ) -> dict[str, Sequence[Any]]:
        """The states of finished requests, each row checked against the token it was forwarded for.

        Args:
            wanted: request id -> the token ids that must have been forwarded for it.
            dropped: requests whose rows are to be forgotten.
            wait: for rows that are still on their way to the host.
            retired: requests whose rows no other will need any more.

        Returns:
            Request id -> one tensor [tokens, hidden_size] per layer id; without ``wait``, of those that have arrived.
        """
        # A worker in a process of its own that cannot lend its memory sends the rows in its reply: pickled, and copied.
        order = Order(list(wanted), list(dropped), wait, list(retired), self._near, self._borrower.returned())
        try:
            replies: list[Answer | None] = self._call(VllmCompatExtension.vllm_compat_collect, order)
        except Exception as error:
            raise _lost(error) from error
        answers = [answer for answer in replies if answer is not None]
        if not answers:
            raise CaptureError(f"none of {len(replies)} workers answered with captured states")
        rows: dict[str, Any] = {}
        for answer in answers:
            if answer.fault:
                raise CaptureError(f"capturing failed: {answer.fault}")
            if twice := rows.keys() & answer.rows.keys():
                raise CaptureError(f"more than one worker captured {sorted(twice)}")
            self._borrower.forget(answer.worker, answer.gone)
            rows.update(answer.rows)
        late = {request_id for request_id, found in rows.items() if found is None}
        return {i: self._checked(i, ids, rows.get(i)) for i, ids in wanted.items() if i not in late}

    def remove(self) -> None:
        """Take the taps out."""
        self._call(VllmCompatExtension.vllm_compat_remove)

    def _checked(self, request_id: str, wanted: Sequence[int], found: Any) -> Sequence[Any]:
        if found is None:
            raise CaptureError(f"request {request_id!r} finished, and no row of it was ever captured")
        if isinstance(found, Lent):
            try:
                found = self._borrower.tensors(found)
            except OSError as error:
                raise _lost(error) from error
        received, states = found
        if not isinstance(states, list):
            states = columns(states)
        ids = received.tolist()
        if ids != list(wanted):
            for position, (token, own) in enumerate(zip(ids, wanted, strict=False)):
                if token != own:
                    raise TokenMismatchError(request_id, position, token, own)
        shapes = {i: tuple(s.shape) for i, s in zip(self._layer_ids, states, strict=True)}
        if len(ids) != len(wanted) or any(len(shape) != 2 or shape[0] != len(wanted) for shape in shapes.values()):
            raise CaptureError(
                f"request {request_id!r}: {len(wanted)} tokens were to be forwarded, {len(ids)} were; the states are "
                f"{shapes}"
            )
        return states  # type: ignore[no-any-return]

    def _call(self, method: Any, *args: Any) -> list[Any]:
        """Call a method of the extension in every worker: by name, or as a function where it is not mixed in."""
        replies: list[Any] = self._executor.collective_rpc(method.__name__ if self._by_name else method, args=args)
        return replies


def _lost(error: Exception) -> StepError:
    return StepError(
        f"the workers' states could not be had: {type(error).__name__}: {error}. A worker may have died; the engine is "
        "closed, and its requests can be made again in a new one."
    )
