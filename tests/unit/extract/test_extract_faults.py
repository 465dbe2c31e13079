"""Every file operation of a run is made to fail, one after another; the same command then gives the same tree."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from vllm_compat.errors import StorageError
from vllm_compat.extract import extract, files
from vllm_compat.extract.journal import read_journal

if TYPE_CHECKING:
    from tests.unit.extract.conftest import MakeConfig, MakeEngine, SomeRows, TreeOf, WriteRows

SAMPLES = 3
OPERATIONS = ("open", "write", "fsync", "replace", "ftruncate", "mkdir")
FAULTS = {"full": errno.ENOSPC, "failing": errno.EIO, "interrupted": errno.EINTR, "short": None}


class FaultyOs:
    """``os`` for the module that writes: its ``at``-th operation fails, and those after it too if the fault stays."""

    def __init__(self, at: int, fault: str, *, stays: bool) -> None:
        self.count = 0
        self.failed = ""
        self._at, self._fault, self._stays = at, fault, stays
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in OPERATIONS:
            return real

        def operation(*args: Any) -> Any:
            with self._lock:
                due = self.count == self._at or (self._stays and bool(self.failed))
                self.count += 1
                if due:
                    self.failed = self.failed or name
            number = FAULTS[self._fault]
            if due and number is None and name == "write":
                return real(args[0], args[1][: max(1, len(args[1]) // 3)])
            if due and number is not None:
                raise OSError(number, os.strerror(number))
            return real(*args)

        return operation


def failure(run: Callable[[], object]) -> StorageError | None:
    """What the file system did to a run."""
    try:
        run()
    except StorageError as error:
        return error
    return None


@pytest.fixture(autouse=True)
def no_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Syncs take long, and the machine does not crash here."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.mark.parametrize(
    ("fault", "stays"), [("full", True), ("full", False), ("failing", False), ("interrupted", False), ("short", True)]
)
def test_whatever_fails_the_same_command_goes_on_to_the_same_tree(
    config: MakeConfig,
    make_engine: MakeEngine,
    write_rows: WriteRows,
    some_rows: SomeRows,
    tree_of: TreeOf,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    stays: bool,
) -> None:
    write_rows(some_rows(SAMPLES))
    settings, clean = config(writers=1), config(output_dir=Path(config().output_dir).with_name("clean"))
    folder = Path(settings.output_dir)
    extract(clean, make_engine())
    wanted = tree_of(Path(clean.output_dir))
    failed: set[str] = set()
    for at in range(1000):
        shutil.rmtree(folder, ignore_errors=True)
        faulty = FaultyOs(at, fault, stays=stays)
        with monkeypatch.context() as patch:
            patch.setattr(files, "os", faulty)
            error = failure(lambda: extract(settings, make_engine()))
        if error is None:
            assert fault == "short" or not faulty.failed
        else:
            assert (error.exit_code, error.errno) == (74, FAULTS[fault])
        if (journal := folder / "journal-0-of-1.jsonl").exists():
            entries = [entry for _, entry in read_journal(journal, SAMPLES)]
            for entry in entries:
                assert (folder / entry.file).read_bytes() == wanted[0][entry.file]
            assert len(entries) == SAMPLES or b'"complete": false' in (folder / "run.json").read_bytes()
        assert extract(settings, make_engine()).complete
        assert tree_of(folder) == wanted, f"operation {at}: {faulty.failed}"
        failed.add(faulty.failed)
        if not faulty.failed:
            break
    else:
        raise AssertionError("there was no end of operations")
    assert failed == {*OPERATIONS, ""}, "each kind of operation had its turn"
    assert at > 10 * SAMPLES


@pytest.mark.parametrize("fault", ["full", "short"])
def test_the_same_while_going_on(
    config: MakeConfig,
    make_engine: MakeEngine,
    write_rows: WriteRows,
    some_rows: SomeRows,
    tree_of: TreeOf,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    """Faults while a torn tail is cut, a temporary file is swept away and a lost file is made again."""
    write_rows(some_rows(SAMPLES))
    settings = config(writers=1)
    folder, torn = Path(settings.output_dir), Path(settings.output_dir).with_name("torn")
    extract(settings, make_engine())
    wanted = tree_of(folder)
    folder.rename(torn)
    with (torn / "journal-0-of-1.jsonl").open("ab") as journal:
        journal.write(b"0123")
    (torn / "hs_1.safetensors").unlink()
    (torn / ".hs_2.tmp-0-of-1-01234567").write_bytes(b"half")
    for at in range(1000):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(torn, folder)
        faulty = FaultyOs(at, fault, stays=True)
        with monkeypatch.context() as patch:
            patch.setattr(files, "os", faulty)
            error = failure(lambda: extract(settings, make_engine()))
        assert error is None or fault != "short"
        assert extract(settings, make_engine()).complete
        assert tree_of(folder) == wanted, f"operation {at}: {faulty.failed}"
        if not faulty.failed:
            return
    raise AssertionError("there was no end of operations")
