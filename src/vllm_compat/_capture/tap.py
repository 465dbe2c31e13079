"""One worker's taps: what its layers put out, kept by request until it is collected."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from vllm_compat._adapters.registry import behaviours, named
from vllm_compat._adapters.rows import RowOwners, first_position
from vllm_compat._adapters.step import PENDING, is_pending
from vllm_compat._capture.layers import find_decoder_layers
from vllm_compat.errors import UnsupportedModelError
from vllm_compat.types import NORM, LayerId

__all__ = ["Tap"]


class Tap:
    """Taps on one worker's model and runner, from construction to ``remove``.

    A pass goes: ``execute_model`` arms the taps, the model's forward gives the token ids and the state after the norm,
    the hooks give the layers' states, and once the runner is back its rows are given to their owners. On the device a
    state lives no longer than that step.
    """

    def __init__(self, worker: Any, layer_ids: Sequence[LayerId], states: str) -> None:
        runner = worker.model_runner
        model = runner.get_model()
        self._runner = runner
        self._owners = _row_owners(runner)
        self._layer_ids = tuple(layer_ids)
        self._armed = False
        self._received: dict[LayerId, list[Any]] = {}
        self._token_ids: Any = None
        self._rows: dict[str, _Rows] = {}
        self._fault: str | None = None
        self._removers: list[Callable[[], None]] = []

        tapped = [i for i in layer_ids if i != NORM]
        layers = find_decoder_layers(model, worker.model_config.hf_text_config.num_hidden_layers) if tapped else ()
        source = named("states", states)
        for layer_id in tapped:
            self._removers.append(source.install(layers[layer_id], functools.partial(self._receive, layer_id)))
        self._removers.append(_wrap(model, "forward", self._forward))
        self._removers.append(_wrap(runner, "execute_model", self._execute_model))

    def remove(self) -> None:
        """Leave the model and the runner as they were found."""
        while self._removers:
            self._removers.pop()()
        self._rows.clear()

    def collect(self, finished: Sequence[str], dropped: Sequence[str]) -> tuple[str | None, dict[str, Any]]:
        """Hand out and forget the states of finished requests; forget those of dropped ones.

        Returns:
            The fault that ended capturing, if any, and for each finished request that has rows its token ids [rows] and
            one tensor [rows, hidden_size] per layer id, all on the CPU.
        """
        for request_id in dropped:
            self._rows.pop(request_id, None)
        if self._fault:
            return self._fault, {}
        return None, {r: self._rows.pop(r).joined() for r in finished if r in self._rows}

    def _execute_model(self, execute_model: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dummy_run") or not scheduler_output.total_num_scheduled_tokens:
            return execute_model(scheduler_output, *args, **kwargs)
        if is_pending(self._runner):  # the V2 runner would write over the unsampled step and say nothing
            raise RuntimeError(PENDING)
        self._received = {layer_id: [] for layer_id in self._layer_ids}
        self._token_ids = None
        self._armed = True
        try:
            output = execute_model(scheduler_output, *args, **kwargs)
            if self._fault is None:
                self._fault = self._sort_rows(scheduler_output)
        finally:
            self._armed = False
            self._received = {}
            self._token_ids = None
        return output

    def _forward(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if self._armed:
            self._token_ids = kwargs.get("input_ids", args[0] if args else None)
            if NORM in self._received:
                state = output[0] if isinstance(output, (tuple, list)) else output
                self._receive(NORM, state.clone())
        return output

    def _receive(self, layer_id: LayerId, state: Any) -> None:
        if self._armed:
            self._received[layer_id].append(state)

    def _sort_rows(self, scheduler_output: Any) -> str | None:
        """Give the rows of the pass to their owners; returns what is wrong, or None."""
        counts = scheduler_output.num_scheduled_tokens
        total = scheduler_output.total_num_scheduled_tokens
        owners = list(self._owners.request_ids(self._runner))
        if len(owners) != len(counts) or set(owners) != set(counts):
            return f"the runner's batch holds {sorted(owners)}, the scheduler chose {sorted(counts)}"
        for layer_id, states in self._received.items():
            if len(states) != 1:
                return (
                    f"layer {layer_id} gave {len(states)} states in one forward pass, wanted 1: the model runs "
                    "compiled, replayed, or in parts that a tap does not see. Build the engine with enforce_eager=True"
                )
            if states[0].shape[0] < total:
                return (
                    f"layer {layer_id} gave {states[0].shape[0]} rows for {total} tokens: the rows are split over ranks"
                )
        token_ids = self._token_ids if self._token_ids is not None else self._owners.token_ids(self._runner)
        token_ids = token_ids[:total].to("cpu", copy=True)
        on_host = [self._received[layer_id][0][:total].to("cpu") for layer_id in self._layer_ids]
        starts = first_position(scheduler_output)
        row = 0
        for request_id in owners:
            end = row + counts[request_id]
            rows = self._rows.setdefault(request_id, _Rows())
            if not rows.put(starts[request_id], token_ids[row:end], [t[row:end] for t in on_host]):
                return (
                    f"request {request_id!r}: tokens {len(rows)} to {starts[request_id]} were not forwarded here "
                    "(taken from a cache, or run before the tap was in)"
                )
            row = end
        return None


class _Rows:
    """The rows of one request so far, in the pieces that its prompt arrived in."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, Any, list[Any]]] = []

    def __len__(self) -> int:
        return self._pieces[-1][0] + len(self._pieces[-1][1]) if self._pieces else 0

    def put(self, start: int, token_ids: Any, states: list[Any]) -> bool:
        """Add rows from position ``start`` on; False when there is a gap before them.

        A request that was preempted starts over: its new rows replace the old ones.
        """
        while self._pieces and self._pieces[-1][0] >= start:
            self._pieces.pop()
        if start > len(self):
            return False
        if start < len(self):
            keep = start - self._pieces[-1][0]
            at, ids, old = self._pieces.pop()
            self._pieces.append((at, ids[:keep], [s[:keep] for s in old]))
        import torch

        # A copy of its own, or one short request would keep the whole batch in memory; and an ordinary tensor, not an
        # inference tensor, or no trainer could use it.
        with torch.inference_mode(False):
            self._pieces.append((start, token_ids.clone(), [s.clone() for s in states]))
        return True

    def joined(self) -> tuple[Any, list[Any]]:
        import torch

        if len(self._pieces) == 1:
            return self._pieces[0][1:]
        return torch.cat([p[1] for p in self._pieces]), [
            torch.cat(s) for s in zip(*(p[2] for p in self._pieces), strict=True)
        ]


def _row_owners(runner: Any) -> RowOwners:
    for kind in behaviours("rows"):
        owners: Any = kind()
        if owners.serves(runner):
            return owners  # type: ignore[no-any-return]
    raise UnsupportedModelError(
        f"runner {type(runner).__module__}.{type(runner).__name__} keeps its batch in a way none of "
        f"{', '.join(k.name for k in behaviours('rows'))} knows; no row could be given to its request"
    )


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> Callable[[], None]:
    """Put ``wrapper(original, ...)`` in place of one object's method; returns what takes it out again."""
    original = getattr(owner, name)
    own = vars(owner).get(name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    def remove() -> None:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)

    setattr(owner, name, wrapped)
    return remove
