"""The first signal finishes what is under way, the second ends the process; the same command then goes on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from vllm_compat.errors import StepError, StoppedError
from vllm_compat.extract import Stop, extract
from vllm_compat.extract.journal import read_journal
from vllm_compat.extract.stop import stop_on_signals
from vllm_compat.testing import FakeEngine
from vllm_compat.types import StepResult

if TYPE_CHECKING:
    from tests.unit.extract.conftest import MakeConfig, MakeEngine, RunOf, SamplesIn, SomeRows, TreeOf, WriteRows

COMMAND = Path(__file__).with_name("fake_command.py")
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path, model: Path, write_rows: WriteRows, some_rows: SomeRows) -> Start:
    """Starts the command over 40 samples, a fraction of which is done in a second."""
    data = write_rows(some_rows(40))

    def run(step_s: float, load_s: float = 0.0, output: str = "out") -> subprocess.Popen[str]:
        options = f"--step-s {step_s} --load-s {load_s} --model {model} --prepared-data {data} --layer-ids 2 5"
        options += f" --output-dir {tmp_path / output} --batch-size 2"
        return subprocess.Popen([sys.executable, str(COMMAND), *options.split()], stderr=subprocess.PIPE, text=True)

    return run


def wait_for(condition: Callable[[], bool], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and what was logged."""
    _, err = process.communicate(timeout=60)
    return process.returncode, err


def files(folder: Path) -> int:
    return len(list(folder.glob("hs_*")))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_finishes_and_exits_75(
    start: Start, tmp_path: Path, run_of: RunOf, samples_in: SamplesIn, tree_of: TreeOf, number: signal.Signals
) -> None:
    folder = tmp_path / "out"
    process = start(0.05)
    wait_for(lambda: files(folder) >= 3)
    process.send_signal(number)
    code, err = ended(process)
    assert code == 75, err
    done = len(samples_in(folder))
    assert 3 <= done < 40
    assert f"{number.name}: finishing what is under way" in err
    assert err.splitlines()[-1] == (
        f"error: stopped by {number.name}: {done} of 40 samples are done in {folder}, each whole; the same command "
        "goes on from there"
    )
    assert len(list(read_journal(folder / "journal-0-of-1.jsonl", 40))) == done, "nothing that was written is in doubt"
    assert run_of(folder)["complete"] is False
    assert not (folder / "draft_config.json").exists()

    code, err = ended(start(0))
    assert code == 0
    assert f"{done} samples are done already; {40 - done} are to be done" in err
    assert ended(start(0, output="clean"))[0] == 0
    assert tree_of(folder) == tree_of(tmp_path / "clean")


def test_a_second_signal_ends_the_process_at_once(start: Start, tmp_path: Path, run_of: RunOf) -> None:
    folder = tmp_path / "out"
    process = start(1.0)
    wait_for(lambda: files(folder) >= 1)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    sent = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert ended(process)[0] == -signal.SIGINT
    assert time.monotonic() - sent < 0.9, "it did not wait for the step"
    assert run_of(folder)["complete"] is False
    assert ended(start(0))[0] == 0
    assert run_of(folder)["complete"] is True


def test_a_signal_while_the_model_loads_ends_the_load(start: Start, tmp_path: Path) -> None:
    process = start(0, load_s=60)
    assert process.stderr
    wait_for(lambda: "loading" in (process.stderr.readline() if process.stderr else ""))
    process.send_signal(signal.SIGTERM)
    code, err = ended(process)
    assert code == 75
    assert err.endswith("error: stopped by SIGTERM; the same command goes on from there\n")
    assert ended(start(0))[0] == 0
    assert json.loads((tmp_path / "out" / "run.json").read_text())["complete"] is True


class Stopping(FakeEngine):
    """Asks for the end in its third step, as another thread would."""

    stop: Stop

    def run_step(self, meanwhile: Callable[[], None] | None = None) -> StepResult:
        if self._steps == 2:
            self.stop.request("the caller")
        return super().run_step(meanwhile)


def test_a_caller_of_the_library_stops_a_run_too(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, some_rows: SomeRows, samples_in: SamplesIn
) -> None:
    write_rows(some_rows(12))
    engine = make_engine(Stopping, max_num_seqs=2)
    assert isinstance(engine, Stopping)
    engine.stop = Stop()
    with pytest.raises(StoppedError, match=r"stopped by the caller: .* of 12 samples are done") as caught:
        extract(config(), engine, stop=engine.stop)
    assert (caught.value.reason, caught.value.exit_code) == ("the caller", 75)
    assert not engine.has_unfinished, "what was under way is finished"
    done = len(samples_in(Path(config().output_dir)))
    assert 4 <= done < 12
    assert extract(config(), make_engine()).kept == done
    with pytest.raises(StoppedError):
        extract(config(output_dir=Path(config().output_dir) / "2"), make_engine(), stop=engine.stop)


class Killed(FakeEngine):
    """Its workers got the signal, too."""

    stop: Stop

    def run_step(self, meanwhile: Callable[[], None] | None = None) -> StepResult:
        if self._steps == 2:
            self.stop.request("SIGINT")
            self.close()
            raise StepError("a step failed inside vLLM: a worker died")
        return super().run_step(meanwhile)


def test_a_signal_that_goes_to_the_workers_too(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, some_rows: SomeRows
) -> None:
    """As Ctrl-C on a terminal does: what was under way is lost, and done by the next start."""
    write_rows(some_rows(12))
    engine = make_engine(Killed, max_num_seqs=2)
    assert isinstance(engine, Killed)
    engine.stop = Stop()
    with pytest.raises(StoppedError, match=r"stopped by SIGINT: \d of 12 samples are done") as caught:
        extract(config(), engine, stop=engine.stop)
    assert isinstance(caught.value.__cause__, StepError)
    assert extract(config(), make_engine()).complete


def test_handlers_are_put_back_and_belong_to_the_main_thread() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with stop_on_signals() as stop:
        assert signal.getsignal(signal.SIGTERM) != before[1]
        with stop.heeding():
            signal.raise_signal(signal.SIGTERM)
        assert stop.reason == "SIGTERM"
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    with pytest.raises(KeyboardInterrupt), stop_on_signals():
        signal.raise_signal(signal.SIGINT)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before

    seen: list[object] = []

    def elsewhere() -> None:
        with stop_on_signals():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [before[1]]
