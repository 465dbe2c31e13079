"""Replicas of the model on a Ray cluster: an actor each, with GPUs of its own.

Ray is imported inside functions only, and nothing of ours runs in its workers but what is here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from vllm_compat.engine import Engine
from vllm_compat.errors import UsageError, VllmCompatError
from vllm_compat.extract.config import ExtractConfig
from vllm_compat.extract.dispatch import Ended, Event, Failed, Lost, Opened, ReplicaError, Told
from vllm_compat.extract.plan import make_plan
from vllm_compat.extract.record import RUN_FILE, read_record
from vllm_compat.extract.rehearsal import Rehearsal, rehearse
from vllm_compat.extract.run import extract
from vllm_compat.extract.spent import Spent
from vllm_compat.extract.stop import Stop
from vllm_compat.types import LayerId

__all__ = ["OpenEngine", "Orders", "RayPool", "cluster", "import_ray"]

_TELL_EVERY_S = 2.0
_CLOSE_S = 20.0
_CONTROL = "control"
_PASSED_ON = ("VLLM_", "HF_HUB_", "PYTHONPATH", "HF_HOME")
_OF_THE_NODE = frozenset({"VLLM_HOST_IP", "VLLM_HOST_PORT", "VLLM_PORT", "VLLM_RPC_BASE_PATH"})
_LONGEST_WHY = 400
_NAMELESS = ("class_name:", "actor_id:", "namespace:")

OpenEngine: TypeAlias = Callable[..., Engine]
"""As ``vllm_compat.open_engine``; a function of a module that every node can import."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Orders:
    """What a replica is told.

    Attributes:
        config: of the whole run.
        count: of shards.
        layer_ids: for the engine.
        max_model_len: for the engine.
        folder: where relative paths begin.
        open_engine: what opens it.
    """

    config: ExtractConfig
    count: int
    layer_ids: tuple[LayerId, ...]
    max_model_len: int
    folder: str
    open_engine: OpenEngine


class Replica:
    """The actor: one engine, and one shard after the other. ``stop`` and ``told`` have a thread of their own."""

    def __init__(self, number: int, orders: Orders) -> None:
        self._number = number
        self._orders = orders
        self._engine: Engine | None = None
        self._stop = Stop()
        self._written = _Written()

    def open(self) -> Event:
        """Open the engine."""
        orders = self._orders
        try:
            _begin(self._number, orders)
            options = orders.config.open_engine_options(orders.max_model_len)
            self._engine = orders.open_engine(orders.config.model, layer_ids=orders.layer_ids, **options)
        except Exception as error:
            return _failed(self._number, error)
        return Opened(self._number)

    def work(self, shard: int) -> Event:
        """Do a shard."""
        config = dataclasses.replace(self._orders.config, shard=(shard, self._orders.count), rehearsal=False)
        try:
            summary = extract(config, self._engine, progress=self._written.begin, stop=self._stop)
        except Exception as error:
            return _failed(self._number, error)
        return Ended(self._number, summary, self._written.take())

    def stop(self, reason: str) -> None:
        """Finish what is under way, and no more."""
        self._stop.request(reason)

    def told(self) -> Event:
        """What was written since the last time."""
        return Told(self._number, self._written.take())

    def close(self) -> None:
        """Close the engine; the process is then ended."""
        if self._engine and not self._engine.closed:
            self._engine.close()


class _Written:
    """A ``Progress`` that keeps what it is told, for another thread."""

    def __init__(self) -> None:
        self._samples: list[tuple[int, int]] = []
        self._lock = threading.Lock()

    def begin(self, total: int) -> _Written:
        return self

    def advance(self, tokens: int, size: int, spent: Spent | None = None) -> None:
        with self._lock:
            self._samples.append((tokens, size))

    def close(self) -> None:
        """Nothing to end."""

    def take(self) -> tuple[tuple[int, int], ...]:
        with self._lock:
            taken, self._samples = tuple(self._samples), []
        return taken


class RayPool:
    """Replicas as actors; see ``dispatch.Pool``."""

    def __init__(self, ray: Any, orders: Orders, replicas: int) -> None:
        self._ray = ray
        self._orders = orders
        self._options = _options(ray, orders.config, replicas)
        self._kind = ray.remote(**self._options, max_restarts=0, max_task_retries=0, concurrency_groups={_CONTROL: 1})(
            Replica
        )
        self._actors: dict[int, Any] = {}
        self._running: dict[Any, int] = {}  # what the caller waits for
        self._asked: dict[Any, int] = {}  # how far they are
        self._asked_at = time.monotonic()

    def rehearse(self) -> Rehearsal | None:
        """Rehearse where the first replica will be, in a process that ends with it; the log tells of it.

        Raises:
            VllmCompatError: it failed.
        """
        task = self._ray.remote(_rehearse).options(**self._options)
        found: Rehearsal | None
        error: VllmCompatError | None
        try:
            found, error = self._ray.get(task.remote(self._orders))
        except self._ray.exceptions.RayError as lost:
            raise ReplicaError(
                f"the rehearsal on the cluster came to no end: {_why(lost)}. --no-rehearsal goes without"
            ) from lost
        if error:
            raise error
        return found

    def start(self, replica: int) -> None:
        self.end(replica)
        self._actors[replica] = actor = self._kind.remote(replica, self._orders)
        self._running[actor.open.remote()] = replica

    def work(self, replica: int, shard: int) -> None:
        self._running[self._actors[replica].work.remote(shard)] = replica

    def stop(self, replica: int, reason: str) -> None:
        self._actors[replica].stop.options(concurrency_group=_CONTROL).remote(reason)

    def end(self, replica: int) -> None:
        for waiting in (self._running, self._asked):
            for ref in [ref for ref, of in waiting.items() if of == replica]:
                del waiting[ref]
        if actor := self._actors.pop(replica, None):
            self._ray.kill(actor, no_restart=True)

    def events(self, timeout_s: float) -> Sequence[Event]:
        self._ask()
        refs = [*self._running, *self._asked]
        if not refs:
            time.sleep(timeout_s)
            return []
        ready, _ = self._ray.wait(refs, num_returns=1, timeout=timeout_s)
        return [event for ref in ready if (event := self._event(ref))]

    def close(self) -> None:
        """Close every engine, and end every process."""
        ends = [actor.close.remote() for n, actor in self._actors.items() if n not in self._running.values()]
        with contextlib.suppress(Exception):
            if ends:
                self._ray.wait(ends, num_returns=len(ends), timeout=_CLOSE_S)
        for replica in list(self._actors):
            with contextlib.suppress(Exception):  # the cluster itself may be gone
                self.end(replica)

    def _event(self, ref: Any) -> Event | None:
        asked = ref in self._asked
        replica = self._asked.pop(ref) if asked else self._running.pop(ref)
        try:
            event: Event = self._ray.get(ref)
        except self._ray.exceptions.RayError as error:
            return None if asked else Lost(replica, _why(error))
        return event

    def _ask(self) -> None:
        """Have those that are at it tell how far they are, once in a while."""
        if time.monotonic() - self._asked_at < _TELL_EVERY_S:
            return
        self._asked_at = time.monotonic()
        for replica in set(self._running.values()) - set(self._asked.values()):
            self._asked[self._actors[replica].told.options(concurrency_group=_CONTROL).remote()] = replica


def import_ray() -> Any:
    """The module ``ray``.

    Raises:
        UsageError: it is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise UsageError(
            f"replicas run on Ray, which cannot be imported here ({error}). It is an extra: pip install "
            "'vllm-compat[ray]', on every node. --shard does the same without Ray"
        ) from error


@contextlib.contextmanager
def cluster(ray: Any) -> Generator[None, None, None]:
    """A connection to the cluster of ``RAY_ADDRESS``, else to one that runs on this machine, else to one of our own.

    One that the caller has made is taken, and left.
    """
    if ray.is_initialized():
        yield
        return
    with _own_signal_handlers(), _folder_outside():
        try:
            ray.init()
        except Exception as error:
            raise ReplicaError(
                f"no Ray cluster: {_why(error)}. RAY_ADDRESS={os.environ.get('RAY_ADDRESS', '')!r}; without it a "
                "cluster that runs on this machine is taken, else one is started here"
            ) from error
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _folder_outside() -> Generator[None, None, None]:
    """Ray does not start, and does not end, with its folder in a virtual environment, where some runners put TMPDIR."""
    inside = Path(sys.prefix).resolve() in Path(tempfile.gettempdir()).resolve().parents
    if not inside or "RAY_TMPDIR" in os.environ:
        yield
        return
    os.environ["RAY_TMPDIR"] = "/tmp"
    try:
        yield
    finally:
        del os.environ["RAY_TMPDIR"]


@contextlib.contextmanager
def _own_signal_handlers() -> Generator[None, None, None]:
    """The handlers of before are put back: Ray's own ends this process at the first SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    terminated = False
    try:
        yield
    except SystemExit:
        terminated = True
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if terminated:
            signal.raise_signal(signal.SIGTERM)  # for the handler that it was meant for


def _options(ray: Any, config: ExtractConfig, replicas: int) -> dict[str, Any]:
    """What of a node a replica takes, and its environment.

    Raises:
        UsageError: no node has as many GPUs.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = [int(node.get("GPU", 0)) for node in nodes]
    wanted = config.tensor_parallel_size if any(gpus) else 0
    if wanted > max(gpus, default=0):
        raise UsageError(
            f"a replica wants {wanted} GPUs of one node (--tp-size), and no node of this Ray cluster has more than "
            f"{max(gpus)}. One model over several nodes is vLLM's own affair: see docs/scale.md"
        )
    places = sum(int(min(node.get("CPU", 0), node.get("GPU", 0) // wanted if wanted else replicas)) for node in nodes)
    if places < replicas:
        logger.warning(
            "%d replicas are asked for, and this Ray cluster has room for %d, at 1 CPU and %d GPUs each; the others "
            "wait for a place",
            replicas,
            places,
            wanted,
        )
    return {"num_cpus": 1, "num_gpus": wanted, "runtime_env": {"env_vars": _environment(os.environ)}}


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What replicas take over of this process's environment; what names a node or a port is each node's own."""
    return {name: value for name, value in environ.items() if name.startswith(_PASSED_ON) and name not in _OF_THE_NODE}


def _begin(number: int, orders: Orders) -> None:
    """Be where the command was started, and see the same folder."""
    try:
        os.chdir(orders.folder)
    except OSError as error:
        raise UsageError(
            f"replica {number} on {os.uname().nodename} cannot go to {orders.folder}, where the command was started: "
            f"{error}. Start it in a folder that every node has"
        ) from error
    assert orders.config.output_dir is not None
    output = Path(orders.config.output_dir).absolute()
    if not output.is_dir() or read_record(output) is None:
        raise UsageError(
            f"replica {number} on {os.uname().nodename} finds no {RUN_FILE} in {output}, and where the command was "
            "started there is one. Give an output folder that all nodes share"
        )
    logging.getLogger("vllm_compat.extract.report").setLevel(logging.ERROR)  # the command has said it already


def _failed(number: int, error: Exception) -> Failed:
    """Only our own errors are sure to be understood where the command was started."""
    ours = error if isinstance(error, VllmCompatError) else ReplicaError(f"{type(error).__name__}: {error}")
    return Failed(number, ours, "".join(traceback.format_exception(error)))


def _rehearse(orders: Orders) -> tuple[Rehearsal | None, VllmCompatError | None]:
    try:
        _begin(0, orders)
        return rehearse(orders.config, make_plan(orders.config)), None
    except VllmCompatError as error:
        return None, error


def _why(error: Exception) -> str:
    """In one line, without what names nothing that a person knows."""
    lines = (line.strip() for line in str(error).splitlines())
    text = " ".join(line for line in lines if line and not line.startswith(_NAMELESS))
    return text if len(text) <= _LONGEST_WHY else f"{text[:_LONGEST_WHY]}..."
