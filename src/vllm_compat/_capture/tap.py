"""One worker's taps: what its layers put out, kept by request until it is collected."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from vllm_compat._adapters.registry import behaviours, named
from vllm_compat._adapters.rows import RowOwners, first_position
from vllm_compat._adapters.states import summands
from vllm_compat._adapters.step import PENDING, is_pending
from vllm_compat._capture.division import Division
from vllm_compat._capture.kept import KeptRows
from vllm_compat._capture.layers import find_decoder_layers
from vllm_compat._capture.lending import LendingMemory, Lent
from vllm_compat._capture.memory import Memory, Room
from vllm_compat._capture.shared import SharedRows
from vllm_compat._capture.slots import OneByOne, Slots
from vllm_compat._capture.stack import Kind, Stack
from vllm_compat.errors import UnsupportedModelError
from vllm_compat.types import NORM, LayerId

__all__ = ["Captured", "Tap"]

Captured: TypeAlias = tuple[Any, Any] | Lent
"""The token ids [rows] of a request, and its states: one tensor [rows, layers, hidden_size], or a list of tensors
[rows, hidden_size] where layers differ in dtype or width. A view of a stack would cross to another process whole. Or
where the first two are."""


@dataclass(frozen=True, slots=True)
class _Share:
    """The rows of a pass that are one request's."""

    request_id: str
    kept: KeptRows
    start: int
    row: int
    count: int


@dataclass(frozen=True, slots=True)
class _Owed:
    """The first rows of a request that were not forwarded for it, and that another has."""

    request_id: str
    token_ids: Sequence[int]
    kept: KeptRows
    count: int


class Tap:
    """Taps on one worker's model and runner, from construction to ``remove``.

    A pass goes: ``execute_model`` arms the taps, the hooks and the model's forward write the layers' states into a
    stack on the device, and once the runner is back it is settled whose its rows are. They are copied to the host, and
    given to their owners, while the device is at work on the next pass, or when they are waited for.
    """

    def __init__(
        self,
        worker: Any,
        layer_ids: Sequence[LayerId],
        states: str,
        *,
        shares: bool = False,
        division: Division | None = None,
        memory: Memory | None = None,
    ) -> None:
        """Put them in.

        Args:
            worker: vLLM's.
            layer_ids: what to capture.
            states: how; see ``StateSource``.
            shares: whether requests that begin with the same tokens share their rows.
            division: which requests; all of them when left out.
            memory: for their rows.
        """
        runner = worker.model_runner
        model = runner.get_model()
        self._runner = runner
        self._owners = _row_owners(runner)
        self._layer_ids = tuple(layer_ids)
        self._model_name = type(model).__name__
        self._norm = self._layer_ids.index(NORM) if NORM in self._layer_ids else None
        self._stack = Stack(len(self._layer_ids))
        self._kinds: tuple[Kind, ...] = ()
        self._armed = False
        self._token_ids: Any = None
        self._shares: list[_Share] = []
        self._rows: dict[str, KeptRows] = {}
        self._shared = SharedRows() if shares else None
        self._division = division or Division()
        self._memory = memory or Memory()
        self._slots = Slots(self._memory)
        self._owed: list[_Owed] = []
        self._fault: str | None = None
        self._removers: list[Callable[[], None]] = []

        tapped = [i for i in layer_ids if i != NORM]
        layers = find_decoder_layers(model, worker.model_config.hf_text_config.num_hidden_layers) if tapped else ()
        source = named("states", states)
        for place, layer_id in enumerate(self._layer_ids):
            if layer_id != NORM:
                receive = functools.partial(self._receive, place)
                self._removers.append(source.install(layers[layer_id], receive))
        self._removers.append(_wrap(model, "forward", self._forward))
        self._removers.append(_wrap(runner, "execute_model", self._execute_model))

    def remove(self) -> None:
        """Leave the model and the runner as they were found."""
        while self._removers:
            self._removers.pop()()
        self._rows.clear()
        self._shares, self._owed = [], []
        if self._shared is not None:
            self._shared.clear()
        self._memory.close()

    def collect(
        self,
        finished: Sequence[str],
        dropped: Sequence[str],
        wait: bool,
        retired: Sequence[str] = (),
        lend: bool = False,
    ) -> tuple[str | None, dict[str, Captured | None]]:
        """Hand out and forget the states of finished requests; forget those of dropped ones.

        Where rows are shared they stay for others until the request is retired. With ``lend`` rows that are in memory
        that can be lent are.

        Returns:
            The fault that ended capturing, if any, and the states of each finished request that has rows, on the CPU.
            Without ``wait`` that is None for one whose last rows are still on their way; it is kept.
        """
        for request_id in dropped:
            self._rows.pop(request_id, None)
        for request_id in (*finished, *dropped):
            self._division.forget(request_id)
        if self._shared is not None and retired:
            self._shared.forget(retired)
        late = {share.request_id for share in self._shares}.intersection(finished)
        if wait and late:
            self._give_out()
            late.clear()
        if self._fault:
            return self._fault, {}
        return None, {
            r: None if r in late else self._captured(self._rows.pop(r).joined(), lend)
            for r in finished
            if r in self._rows
        }

    def _execute_model(self, execute_model: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dummy_run") or not scheduler_output.total_num_scheduled_tokens:
            return execute_model(scheduler_output, *args, **kwargs)
        if is_pending(self._runner):  # the V2 runner would write over the unsampled step and say nothing
            raise RuntimeError(PENDING)
        self._stack.begin(scheduler_output.total_num_scheduled_tokens)
        self._token_ids = None
        self._armed = True
        try:
            output = execute_model(scheduler_output, *args, **kwargs)
            if self._fault is None:
                self._fault = self._take(scheduler_output) or self._fault  # giving rows out may find one, too
        finally:
            self._armed = False
            self._token_ids = None
        return output

    def _forward(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if self._armed:
            self._token_ids = kwargs.get("input_ids", args[0] if args else None)
            if self._norm is not None:
                state = output[0] if isinstance(output, (tuple, list)) else output
                self._receive(self._norm, summands(state, f"model {self._model_name}"))
            # This pass is queued and the device busy; sampling, up to 0.11.0 in this very call, will wait for it.
            self._give_out()
        return output

    def _receive(self, place: int, parts: Sequence[Any]) -> None:
        if self._armed:
            self._stack.write(place, parts)

    def _take(self, scheduler_output: Any) -> str | None:
        """Settle whose the rows of the pass are, and send them to the host; returns what is wrong, or None."""
        counts = scheduler_output.num_scheduled_tokens
        total = scheduler_output.total_num_scheduled_tokens
        owners = list(self._owners.request_ids(self._runner))
        if len(owners) != len(counts) or set(owners) != set(counts):
            return f"the runner's batch holds {sorted(owners)}, the scheduler chose {sorted(counts)}"
        for layer_id, received in zip(self._layer_ids, self._stack.received, strict=True):
            if len(received) != 1:
                return (
                    f"layer {layer_id} gave {len(received)} states in one forward pass, wanted 1: the model runs "
                    "compiled, replayed, or in parts that a tap does not see. Build the engine with enforce_eager=True"
                )
            if received[0] < total:
                return f"layer {layer_id} gave {received[0]} rows for {total} tokens: the rows are split over ranks"
        kinds = tuple(self._stack.kinds)
        if self._kinds not in ((), kinds):
            return f"the layers' states were {self._kinds}, and are {kinds} in this pass (dtype, layers, hidden size)"
        self._kinds = kinds
        starts = first_position(scheduler_output)
        begun = self._begin(scheduler_output, starts)
        shares, row = [], 0
        for request_id in owners:
            start, count = starts[request_id], counts[request_id]
            if not self._division.is_others(request_id):
                kept = self._rows[request_id]
                if not kept.expect(start, count):
                    return _gap(request_id, len(kept), start)
                shares.append(_Share(request_id, kept, start, row, count))
            row += count
        owed = [_Owed(i, token_ids, self._rows[i], starts[i]) for i, token_ids in begun.items()]
        self._give_out()
        token_ids = self._token_ids if self._token_ids is not None else self._owners.token_ids(self._runner)
        if shares:
            self._stack.send(token_ids, _ranges(shares))
        self._shares, self._owed = shares, owed
        if not self._stack.late:
            self._give_out()
        return None

    def _begin(self, scheduler_output: Any, starts: Mapping[str, int]) -> dict[str, Sequence[int]]:
        """Make room for the requests that begin in this pass.

        Returns:
            Those whose first tokens were in the KV cache, in the order in which they were chosen, with their tokens.
        """
        new = {r.req_id: getattr(r, "prompt_token_ids", None) for r in scheduler_output.scheduled_new_reqs}
        begun: dict[str, Sequence[int]] = {}
        for request_id in [*new, *(i for i in starts if i not in new)]:
            start, token_ids = starts[request_id], new.get(request_id)
            if start and (kept := self._rows.get(request_id)) is not None:
                # It goes on. After it was preempted another may have gone further with the same tokens meanwhile.
                if self._shared is not None and start > len(kept):
                    begun[request_id] = self._shared.prompt_of(kept)
                    kept.skip(start)
                continue
            if self._division.is_others(request_id):
                continue
            if request_id not in self._rows and not self._division.is_ours(request_id, len(token_ids or ())):
                continue
            kept = self._rows[request_id] = KeptRows(len(token_ids or ()), self._memory, self._slots)
            if self._shared is not None and token_ids:
                self._shared.add(request_id, token_ids, kept)
                if start:
                    kept.skip(start)
                    begun[request_id] = token_ids
        return begun

    def _give_out(self) -> None:
        """Copy the rows of the last pass to their owners, if that is still to be done."""
        if not self._shares:
            return
        shares, self._shares = self._shares, []
        tensors = self._stack.fetch()
        one_by_one = OneByOne()
        for share in shares:
            # Rows of a request that was dropped since, or began anew, are nobody's, unless others may need them.
            if self._shared is None and self._rows.get(share.request_id) is not share.kept:
                continue
            if share.count > 1 or not share.kept.write_later(share.start, share.row, tensors, one_by_one):
                share.kept.write(share.start, [tensor[share.row : share.row + share.count] for tensor in tensors])
        one_by_one.copy(tensors)
        owed, self._owed = self._owed, []
        unfilled = {part.kept for part in owed}
        for part in owed:  # which may be rows of this very pass
            source = self._shared.find(part.token_ids, part.count, unfilled) if self._shared is not None else None
            unfilled.discard(part.kept)
            if source is None:
                self._fault = self._fault or _gap(part.request_id, 0, part.count)
                return
            part.kept.write(0, source.first(part.count))

    def _captured(self, room: Room, lend: bool) -> Captured:
        token_ids, *stacks = room.tensors
        if lend and len(stacks) == 1 and isinstance(self._memory, LendingMemory) and (lent := self._memory.lend(room)):
            return lent
        if len(stacks) == 1:
            return token_ids, stacks[0]
        of_kind = dict(zip(dict.fromkeys(self._kinds), stacks, strict=True))
        return token_ids, [of_kind[kind][:, place].clone() for place, kind in enumerate(self._kinds)]


def _ranges(shares: Sequence[_Share]) -> list[tuple[int, int]]:
    """Their rows, those that follow each other as one range."""
    found: list[tuple[int, int]] = []
    for share in shares:
        begin = found.pop()[0] if found and found[-1][1] == share.row else share.row
        found.append((begin, share.row + share.count))
    return found


def _gap(request_id: str, found: int, start: int) -> str:
    return (
        f"request {request_id!r}: tokens {found} to {start} were not forwarded here (taken from a cache, or run before "
        "the tap was in)"
    )


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
