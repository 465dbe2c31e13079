"""What is settled before any replica starts; without Ray."""

from __future__ import annotations

import logging
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.unit.extract.conftest import LAYERS

from vllm_compat.errors import StoppedError, UsageError
from vllm_compat.extract import extract
from vllm_compat.extract.__main__ import main
from vllm_compat.extract.dispatch import Ended, Failed, Opened, ReplicaError, Told
from vllm_compat.extract.ray_pool import Orders, Replica, _environment, _options, _why, cluster
from vllm_compat.extract.replicas import extract_on_ray

if TYPE_CHECKING:
    from tests.unit.extract.conftest import MakeConfig, MakeEngine, SomeRows, WriteRows


class FakeRay:
    """As much of the module as is asked before the first actor."""

    def __init__(self, *nodes: dict[str, float]) -> None:
        self._nodes = [{"Resources": node, "Alive": True} for node in nodes]
        self._nodes.append({"Resources": {"CPU": 99, "GPU": 99}, "Alive": False})
        self.running = False

    def nodes(self) -> list[dict[str, Any]]:
        return self._nodes

    def is_initialized(self) -> bool:
        return self.running

    def init(self) -> None:
        """As Ray does, this takes the signal for itself."""
        self.running = True
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))

    def shutdown(self) -> None:
        self.running = False


def test_replicas_that_cannot_be(config: MakeConfig, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="replicas must be at least 1, found 0"):
        extract_on_ray(config(), 0)
    with pytest.raises(UsageError, match="--shard 1/2 is given, too"):
        extract_on_ray(config(shard=(1, 2)), 2)
    options = f"--model {model} --prepared-data x.jsonl --output-dir {model} --replicas 2 --shard 1/2"
    assert main(options.split()) == 2
    assert "Give one of them" in capsys.readouterr().err


def test_without_ray_the_extra_is_named_before_anything_is_read(
    config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"pip install 'vllm-compat\[ray\]'"):
        extract_on_ray(config(), 2)


@pytest.mark.parametrize(
    ("nodes", "ranks", "gpus", "places"),
    [
        ([{"CPU": 2}], 1, 0, 2),
        ([{"CPU": 2}], 8, 0, 2),  # a CPU's ranks find their cores themselves
        ([{"CPU": 64, "GPU": 8}, {"CPU": 64, "GPU": 8}], 2, 2, 8),
        ([{"CPU": 64, "GPU": 3}, {"CPU": 64, "GPU": 3}], 2, 2, 2),
        ([{"CPU": 1, "GPU": 8}, {"CPU": 8}], 1, 1, 1),
    ],
)
def test_what_a_replica_takes_of_a_node(
    config: MakeConfig,
    caplog: pytest.LogCaptureFixture,
    nodes: list[dict[str, float]],
    ranks: int,
    gpus: int,
    places: int,
) -> None:
    for replicas in (places, places + 1):
        found = _options(FakeRay(*nodes), config(tensor_parallel_size=ranks), replicas)
        assert (found["num_cpus"], found["num_gpus"]) == (1, gpus)
        assert (f"has room for {places}," in caplog.text) is (replicas > places)


def test_a_replica_that_no_node_has_room_for(config: MakeConfig) -> None:
    ray = FakeRay({"CPU": 8, "GPU": 4}, {"CPU": 8, "GPU": 4})
    with pytest.raises(UsageError, match=r"wants 8 GPUs of one node .* more than 4"):
        _options(ray, config(tensor_parallel_size=8), 1)


def test_the_environment_that_replicas_get() -> None:
    passed = {"VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": "src", "HF_HOME": "/hub", "HF_HUB_OFFLINE": "1"}
    own = {
        "VLLM_HOST_IP": "10.0.0.1",
        "VLLM_PORT": "1",
        "HF_TOKEN": "secret",
        "HOME": "/root",
        "CUDA_VISIBLE_DEVICES": "0",
    }
    assert _environment(passed | own) == passed


def test_a_signal_is_ours_again_once_there_is_a_cluster() -> None:
    before = signal.getsignal(signal.SIGTERM)
    ray = FakeRay()
    with cluster(ray):
        assert ray.running
        assert signal.getsignal(signal.SIGTERM) == before
    assert not ray.running
    ray.running = True
    with cluster(ray):
        pass
    assert ray.running, "it is the caller's"


def test_a_signal_while_ray_starts_goes_to_whom_it_was_meant_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    ray = FakeRay()

    def init() -> None:
        FakeRay.init(ray)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(ray, "init", init)
    try:
        with pytest.raises(SystemExit), cluster(ray):
            raise AssertionError("there is none")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]


def test_a_cluster_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay()

    def init() -> None:
        raise ConnectionError("nobody\n  listens")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with (
        pytest.raises(ReplicaError, match=r"no Ray cluster: nobody listens\. RAY_ADDRESS='10.0.0.1:6379'"),
        cluster(ray),
    ):
        pass


def test_a_replica_does_one_shard_after_the_other_and_heeds_a_stop(
    config: MakeConfig,
    make_engine: MakeEngine,
    write_rows: WriteRows,
    some_rows: SomeRows,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The actor, in this process."""
    write_rows(some_rows(9))
    extract(config(shard=(0, 3)), make_engine())
    monkeypatch.chdir(tmp_path)
    orders = Orders(config(), 3, LAYERS, 65, str(tmp_path), lambda *_, **__: make_engine())
    report = logging.getLogger("vllm_compat.extract.report")
    replica = Replica(1, orders)
    try:
        assert replica.open() == Opened(1)
        ended = replica.work(1)
        assert isinstance(ended, Ended)
        assert (ended.replica, len(ended.samples), ended.summary.complete) == (1, 3, False)
        replica.stop("SIGTERM")
        failed = replica.work(2)
        assert isinstance(failed, Failed)
        assert isinstance(failed.error, StoppedError), "it does not begin what is not under way"
        assert replica.told() == Told(1, ())
        replica.close()
    finally:
        report.setLevel(logging.NOTSET)


def test_why_is_one_line_of_what_a_person_knows() -> None:
    text = "The actor died.\n\tclass_name: Replica\n\tactor_id: 4419\n\tpid: 7\n\tip: 10.0.0.1\nIt is gone."
    assert _why(Exception(text)) == "The actor died. pid: 7 ip: 10.0.0.1 It is gone."
    assert len(_why(Exception("x" * 1000))) < 410
