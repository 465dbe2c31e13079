"""Replicas on a real Ray cluster on this machine, of two CPUs, with made-up engines."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.unit.extract import slow_engines

from vllm_compat.errors import RunMismatchError, StoppedError, UsageError
from vllm_compat.extract import Stop, extract
from vllm_compat.extract.dispatch import ReplicaError
from vllm_compat.extract.journal import find_journals, read_journal
from vllm_compat.extract.replicas import extract_on_ray

if TYPE_CHECKING:
    from tests.unit.extract.conftest import MakeConfig, MakeEngine, RunOf, SamplesIn, SomeRows, TreeOf, WriteRows

ray: Any = pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("default")  # of Ray's own making
COMMAND = Path(__file__).with_name("fake_command.py")
ROOT = Path(__file__).parents[3]
HEAD = ROOT / "tests" / "ray_head.py"
ROWS = 48


@pytest.fixture(scope="module")
def _cluster() -> Iterator[None]:
    """One for all tests of this module, which takes a while to start; its processes are not this one's to wait for.

    One whose address is in RAY_ADDRESS is taken, and left.
    """
    if os.environ.get("RAY_ADDRESS"):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else a token is left in the home folder
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_TMPDIR", "/tmp")  # nox's TMPDIR is in an environment, where Ray's folder must not be
        head = subprocess.Popen([sys.executable, str(HEAD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert head.stdin
        assert head.stdout
        with head.stdin, head.stdout:
            address = next((line.split()[1] for line in head.stdout if line.startswith("address")), None)
            if address:
                patch.setenv("RAY_ADDRESS", address)
                yield
        head.wait(60)
    assert address, "Ray did not start"


@pytest.fixture
def pids(_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """The processes that have opened an engine in this test."""
    folder = tmp_path / "pids"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv(slow_engines.PIDS, str(folder))
    return lambda: [int(path.name) for path in folder.iterdir()]


def lines(folder: Path) -> list[int]:
    """The samples that the journals name."""
    return [entry.index for path, _ in find_journals(folder) for _, entry in read_journal(path, ROWS)]


def has(folder: Path, count: int) -> bool:
    """Whether so many samples are done."""
    return folder.exists() and len(lines(folder)) >= count


def when(condition: Callable[[], bool], action: Callable[[], object]) -> threading.Thread:
    """Do something in a thread of its own, once."""

    def watch() -> None:
        while not condition():
            time.sleep(0.01)
        action()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def test_a_killed_replicas_work_is_done_by_the_others(
    pids: Callable[[], list[int]],
    config: MakeConfig,
    make_engine: MakeEngine,
    write_rows: WriteRows,
    some_rows: SomeRows,
    tree_of: TreeOf,
    run_of: RunOf,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "vllm_compat")
    write_rows(some_rows(ROWS))
    clean, folder = tmp_path / "clean", tmp_path / "out"
    extract(config(output_dir=clean, layer_ids=(2, 5)), make_engine(layer_ids=(2, 5)))

    killer = when(lambda: len(pids()) == 2 and len(lines(folder)) >= 6, lambda: os.kill(pids()[0], signal.SIGKILL))
    summary = extract_on_ray(config(layer_ids=(2, 5)), 2, open_engine=slow_engines.open_slow)
    assert not killer.is_alive()
    assert "was lost: The actor died" in caplog.text
    assert "takes over shard" in caplog.text
    assert sorted(lines(folder)) == list(range(ROWS)), "none is missing, and none was done twice"
    assert run_of(folder)["complete"] is True
    assert tree_of(folder) == tree_of(clean)
    assert (summary.complete, summary.samples, summary.kept) == (True, ROWS, 0)
    assert summary.tokens == sum(len(row["input_ids"]) for row in some_rows(ROWS))
    assert summary.tokens_per_second == pytest.approx(summary.tokens / summary.seconds)

    again = extract_on_ray(config(layer_ids=(2, 5)), 3)
    assert (again.complete, again.kept) == (True, ROWS), "nothing is to be done, and nothing was loaded"


def test_a_stop_finishes_what_is_under_way_and_others_go_on(
    pids: Callable[[], list[int]],
    config: MakeConfig,
    write_rows: WriteRows,
    some_rows: SomeRows,
    samples_in: SamplesIn,
    make_engine: MakeEngine,
    tmp_path: Path,
) -> None:
    """Then by a start with another division, and at last by a single process."""
    write_rows(some_rows(ROWS))
    folder = tmp_path / "out"
    for replicas, wanted in ((2, 6), (1, 14)):
        stop = Stop()
        when(partial(has, folder, wanted), partial(stop.request, "SIGTERM"))
        with pytest.raises(StoppedError, match=r"stopped by SIGTERM: \d+ of 48 samples are done") as caught:
            extract_on_ray(config(), replicas, stop=stop, open_engine=slow_engines.open_slow)
        assert (caught.value.exit_code, caught.value.reason) == (75, "SIGTERM")
        done = samples_in(folder)
        assert wanted <= len(done) < ROWS
        assert len(done) == len(lines(folder)), "nothing that was written is in doubt"
    assert extract(config(), make_engine()).kept == len(done)
    assert sorted(lines(folder)) == list(range(ROWS))


def test_errors_come_from_the_replicas_as_they_are(
    pids: Callable[[], list[int]],
    config: MakeConfig,
    make_engine: MakeEngine,
    write_rows: WriteRows,
    some_rows: SomeRows,
) -> None:
    write_rows(some_rows(ROWS))
    with pytest.raises(UsageError, match="vLLM refuses the model"):
        extract_on_ray(config(), 2, open_engine=slow_engines.refuse)
    with pytest.raises(ReplicaError, match=r"every replica was lost 3 times .*RuntimeError: CUDA error: out of memory"):
        extract_on_ray(config(), 1, open_engine=slow_engines.fail)
    extract(config(num_samples=2), make_engine())
    with pytest.raises(RunMismatchError):
        extract_on_ray(config(), 2)


def test_a_folder_that_a_node_does_not_see(
    pids: Callable[[], list[int]], config: MakeConfig, write_rows: WriteRows, some_rows: SomeRows, tmp_path: Path
) -> None:
    from vllm_compat.extract.ray_pool import Orders, Replica

    write_rows(some_rows(3))
    orders = Orders(config(), 2, (2,), 65, str(tmp_path), slow_engines.open_slow)
    before = Path.cwd()
    try:
        event = Replica(1, orders).open()
        assert "replica 1 on" in str(event)
        assert "finds no run.json" in str(event)
        event = Replica(1, Orders(config(), 2, (2,), 65, str(tmp_path / "gone"), slow_engines.open_slow)).open()
        assert "Start it in a folder that every node has" in str(event)
    finally:
        os.chdir(before)


@pytest.mark.usefixtures("_cluster")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_stops_at_a_signal_and_goes_on(
    tmp_path: Path,
    model: Path,
    write_rows: WriteRows,
    some_rows: SomeRows,
    samples_in: SamplesIn,
    run_of: RunOf,
    number: signal.Signals,
) -> None:
    """SIGTERM where it has a cluster of its own, which ends with it. SIGINT goes to the whole group, as Ctrl-C does."""
    data, folder = write_rows(some_rows(ROWS)), tmp_path / "out"
    options = f"--step-s 0.05 --model {model} --prepared-data {data} --output-dir {folder} --layer-ids 2 5"
    command = [sys.executable, str(COMMAND), *options.split(), "--batch-size", "2", "--replicas", "2"]
    own = number == signal.SIGTERM
    environment = os.environ | ({"RAY_ADDRESS": "local"} if own else {})
    if own:  # and a TMPDIR as nox makes it
        del environment["RAY_TMPDIR"]
        environment["TMPDIR"] = str(Path(sys.prefix, "lib"))
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment, start_new_session=True
    )
    assert process.stderr
    seen: list[str] = []
    reader = threading.Thread(target=lambda: seen.extend(process.stderr or ()), daemon=True)
    reader.start()
    while not has(folder, 3):
        if process.poll() is not None:
            reader.join(10)
            if "timed out during startup" in "".join(seen):
                pytest.skip("this machine does too much else for Ray to start in its 30 seconds")
            raise AssertionError("".join(seen))
        time.sleep(0.02)
    os.kill(process.pid, number) if own else os.killpg(process.pid, number)
    assert process.wait(120) == 75, "".join(seen)
    reader.join(10)
    process.stderr.close()
    done = len(samples_in(folder))
    assert f"{number.name}: finishing what is under way" in "".join(seen)
    assert f"error: stopped by {number.name}: {done} of {ROWS} samples are done" in "".join(seen)
    assert 3 <= done < ROWS
    assert run_of(folder)["complete"] is False
    again = subprocess.run([*command, "--step-s", "0"], capture_output=True, env=os.environ, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert sorted(lines(folder)) == list(range(ROWS))
    assert run_of(folder)["complete"] is True
