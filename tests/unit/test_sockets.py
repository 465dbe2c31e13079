"""What vLLM leaves open between the processes is found, and closed."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from vllm_compat._engine import lifetime
from vllm_compat._engine.sockets import close_sockets, find_sockets

zmq: Any = pytest.importorskip("zmq")


class Queue:
    """As vLLM's ``MessageQueue``."""

    __module__ = "vllm.distributed.device_communicators.shm_broadcast"

    def __init__(self, *sockets: Any) -> None:
        self.local_socket, *self.others = sockets
        self.remote_socket = None


class Handle:
    """As what vLLM's executor knows of a worker."""

    __module__ = "vllm.v1.executor.multiproc_executor"

    def __init__(self, queue: Queue, executor: Any) -> None:
        self.worker_response_mq = queue
        self.executor = executor


class Executor:
    """A caller's own, outside vLLM."""

    def __init__(self, *queues: Queue) -> None:
        self.rpc_broadcast_mq, *self.response_mqs = queues
        self.workers = tuple(Handle(queue, self) for queue in queues)


@pytest.fixture
def context() -> Any:
    with zmq.Context() as context:
        yield context


def test_all_of_an_executor_and_of_its_workers_are_found_once_and_closed(context: Any) -> None:
    sockets = [context.socket(zmq.SUB) for _ in range(4)]
    executor = Executor(Queue(sockets[0], sockets[1]), Queue(sockets[2]), Queue(sockets[3]))
    found = find_sockets(executor)
    assert sorted(map(id, found)) == sorted(map(id, sockets))
    close_sockets(found)
    assert all(socket.closed for socket in sockets)
    close_sockets(found)


@pytest.mark.parametrize("error", [None, RuntimeError("no GPU to wait for")])
def test_they_are_closed_after_the_engine_is_shut_down(
    context: Any, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    socket = context.socket(zmq.SUB)
    open_at_shutdown = []

    class Core:
        model_executor = Executor(Queue(socket))

        def shutdown(self) -> None:
            open_at_shutdown.append(not socket.closed)
            clean_up()

    state: Any = ModuleType("vllm.distributed.parallel_state")

    def clean_up() -> None:
        if error:
            raise error

    state.cleanup_dist_env_and_memory = clean_up
    for name in ("vllm", "vllm.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, state.__name__, state)
    lifetime.shut_down([Core()])
    assert open_at_shutdown == [True]
    assert socket.closed


def test_what_cannot_be_delivered_keeps_nobody_waiting() -> None:
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.connect("ipc:///tmp/vllm-compat-nobody-listens")
    socket.send(b"left over")
    close_sockets([socket])
    context.term()  # would wait for ever


def test_sockets_of_others_are_left_alone(context: Any) -> None:
    class Model:
        def __init__(self) -> None:
            self.socket = context.socket(zmq.SUB)

    executor = Executor(Queue(None))
    executor.driver_worker = Model()  # type: ignore[attr-defined]
    assert find_sockets(executor) == []
    executor.driver_worker.socket.close()  # type: ignore[attr-defined]
