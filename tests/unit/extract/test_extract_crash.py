"""Crashes: every state that the machine may leave, and kill -9 at any moment. Nothing is lost, doubled or wrong."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.unit.extract.crash_os import BUGS, CrashOs, Done, State, crash_states

from vllm_compat.errors import JournalError, StepError
from vllm_compat.extract import done as done_samples
from vllm_compat.extract import extract, files, journal
from vllm_compat.extract.journal import Entry, Journal, parse_journal
from vllm_compat.extract.store import Store
from vllm_compat.formats import Format, SampleData, SampleRow

if TYPE_CHECKING:
    from tests.unit.extract.conftest import MakeConfig, MakeEngine, SomeRows, TreeOf, WriteRows

JOURNAL = "journal-0-of-1.jsonl"
KILLS = int(os.environ.get("VLLM_COMPAT_KILLS", "60"))
Traced = Callable[..., CrashOs]


class Replay(Format):
    """Encodes a sample as the file that a clean run has for it."""

    name = description = readers = "replay"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def file(self, index: int, sample_id: str | None) -> PurePosixPath:
        return PurePosixPath(f"hs_{index}.safetensors")

    def encode(self, sample: SampleData) -> list[bytes | memoryview]:
        content = (self.folder / self.file(sample.index, None)).read_bytes()
        return [content[:8], content[8:100], memoryview(content)[100:]]

    def decode(self, path: Path, entry_index: int) -> SampleData:
        raise NotImplementedError

    def row(self, path: Path) -> SampleRow:
        raise NotImplementedError


@pytest.fixture
def clean(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, some_rows: SomeRows, tmp_path: Path
) -> Path:
    """The folder of a run of twelve samples that nothing disturbed."""
    write_rows(some_rows(12))
    extract(config(output_dir=tmp_path / "clean"), make_engine())
    return tmp_path / "clean"


@pytest.fixture
def traced(clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Traced:
    """What the program does to the disk when it commits the samples of the clean run in some threads."""

    def run(threads: int) -> CrashOs:
        folder = tmp_path / "model of a disk"
        folder.mkdir()
        entries = list(done_samples.SealedEntries(clean, 12))
        with monkeypatch.context() as patch:
            patch.setattr(files, "os", crash_os := CrashOs(folder))
            patch.setattr(journal, "lock", lambda *_: True)
            opened = Journal(folder, (0, 1))
            opened.recover(0)
            store = Store(folder, Replay(clean), opened, (0, 1), done_samples.Done(12))

            def commit(entry: Entry) -> None:
                states = np.zeros((entry.tokens, 1, 1))
                sample = SampleData(entry.index, entry.id, tuple(range(entry.tokens)), None, (0,), states, {})
                assert store.commit(sample, entry.sampled) == entry
                crash_os.trace.append(Done(entry.index))

            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(commit, entries))
        return crash_os

    return run


def wrong(states: Iterable[State], clean: Path) -> tuple[int, str]:
    """How many states there are, and what the first of them that may not be would do to a run that goes on."""
    wanted = {path.name: path.read_bytes() for path in clean.glob("hs_*")}
    count = 0
    for state in states:
        count += 1
        try:
            found = [e for _, e in parse_journal(BytesIO(state.files.get(JOURNAL, b"")), Path(JOURNAL), 12)]
        except JournalError as error:
            return count, f"refused: {error}"
        for entry in found:
            if state.files.get(entry.file) != wanted[entry.file]:
                return count, f"sample {entry.index} is taken for done and its file is not whole"
        if lost := state.promised - {entry.index for entry in found}:
            return count, f"samples {lost} were done and are lost"
    return count, ""


@pytest.mark.parametrize("threads", [1, 3])
def test_no_crash_state_lies_or_loses(traced: Traced, clean: Path, threads: int) -> None:
    count, why = wrong(crash_states(traced(threads).trace, JOURNAL), clean)
    assert not why
    assert count > 1500


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(traced: Traced, clean: Path, bug: Callable[[CrashOs, str], Iterable[object]]) -> None:
    trace = bug(traced(1), JOURNAL)
    # A program that never syncs leaves more states than there is time for; the bug is among the first.
    _, why = wrong(itertools.islice(crash_states(trace, JOURNAL), 100_000), clean)  # type: ignore[arg-type]
    assert why


def test_runs_go_on_from_crash_states(
    traced: Traced,
    clean: Path,
    config: MakeConfig,
    make_engine: MakeEngine,
    tree_of: TreeOf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # they take long, and this machine does not crash
    with pytest.raises(StepError):
        extract(config(output_dir=tmp_path / "begun"), make_engine(fail_at_step=0))
    folder = Path(config().output_dir)
    wanted = tree_of(clean)
    states = list(crash_states(traced(3).trace, JOURNAL))
    kept: set[int] = set()
    for state in states[:: len(states) // 40]:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "begun", folder)
        (folder / JOURNAL).unlink()
        for name, content in state.files.items():
            (folder / name).write_bytes(content)
        summary = extract(config(), make_engine())
        assert summary.complete
        assert summary.kept >= len(state.promised)
        assert tree_of(folder) == wanted
        kept.add(summary.kept)
    assert len(kept) > 8, "early states and late ones"


@pytest.mark.parametrize("different", [40, 9])
def test_kill_9(write_rows: WriteRows, some_rows: SomeRows, tmp_path: Path, model: Path, different: int) -> None:
    """See ``kills.py``; VLLM_COMPAT_KILLS is how many. Of samples with the same tokens all but one are copies."""
    rows = some_rows(40)
    data = write_rows([{**row, "input_ids": rows[n % different]["input_ids"]} for n, row in enumerate(rows)])
    command = [
        sys.executable,
        str(Path(__file__).with_name("kills.py")),
        str(model),
        str(data),
        str(tmp_path),
        str(KILLS),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60 + KILLS)
    assert done.returncode == 0, done.stderr[-4000:]
    kills, runs, commits = map(int, done.stdout.split())
    assert kills == KILLS
    assert commits == 40 * runs, "no sample was done twice"
