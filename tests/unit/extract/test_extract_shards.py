"""Several processes into one folder: each its own samples, and the last one to end seals."""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from vllm_compat.errors import StepError, UsageError
from vllm_compat.extract import extract
from vllm_compat.extract import folder as folders
from vllm_compat.extract.journal import Journal, read_journal

if TYPE_CHECKING:
    from tests.unit.extract.conftest import MakeConfig, MakeEngine, RunOf, SomeRows, TreeOf, WriteRows

COMMAND = Path(__file__).with_name("fake_command.py")


@pytest.mark.parametrize("count", [2, 3, 8])
def test_shards_one_after_another(
    config: MakeConfig,
    make_engine: MakeEngine,
    write_rows: WriteRows,
    some_rows: SomeRows,
    tree_of: TreeOf,
    run_of: RunOf,
    caplog: pytest.LogCaptureFixture,
    count: int,
) -> None:
    caplog.set_level(logging.INFO, "vllm_compat")
    write_rows(some_rows(7))
    clean, folder = Path(config().output_dir).with_name("clean"), Path(config().output_dir)
    extract(config(output_dir=clean), make_engine())
    for index in range(count):
        assert not folder.exists() or run_of(folder)["complete"] is (index >= 7)
        summary = extract(config(shard=(index, count)), make_engine())
        owned = [entry.index for _, entry in read_journal(folder / f"journal-{index}-of-{count}.jsonl", 7)]
        assert sorted(owned) == list(range(index, 7, count))
        assert summary.complete is run_of(folder)["complete"]
        assert summary.samples == sum(1 for n in range(7) if n % count <= index)
    assert run_of(folder)["complete"] is True
    assert tree_of(folder) == tree_of(clean)
    assert "this shard is done" in caplog.text
    assert "7 samples are done already; 0 are to be done by this process" in caplog.text or count < 8


def test_the_last_one_makes_every_journal_last_before_it_seals(
    config: MakeConfig,
    make_engine: MakeEngine,
    write_rows: WriteRows,
    some_rows: SomeRows,
    run_of: RunOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_rows(some_rows(4))
    synced: list[tuple[str, bool]] = []

    def sync(path: Path) -> None:
        synced.append((path.name, run_of(path.parent)["complete"]))

    monkeypatch.setattr(folders, "sync_file", sync)
    for index in range(3):
        assert not synced
        extract(config(shard=(index, 3)), make_engine())
    assert synced == [(f"journal-{index}-of-3.jsonl", False) for index in range(3)]


def test_two_processes_at_once(
    config: MakeConfig,
    make_engine: MakeEngine,
    write_rows: WriteRows,
    some_rows: SomeRows,
    tree_of: TreeOf,
    run_of: RunOf,
    tmp_path: Path,
    model: Path,
) -> None:
    data = write_rows(some_rows(30))
    clean, folder = tmp_path / "clean", tmp_path / "both"
    extract(config(output_dir=clean, layer_ids=(2, 5)), make_engine(layer_ids=(2, 5)))
    command = f"--model {model} --prepared-data {data} --output-dir {folder} --layer-ids 2 5 --batch-size 2 --json"
    command += " --max-seq-len 64"
    running = [
        subprocess.Popen(
            [sys.executable, str(COMMAND), "--step-s", "0.002", *command.split(), "--shard", f"{i}/2"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    ends = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0], ends
    assert any(json.loads(out)["complete"] for out, _ in ends), "the last one to end seals"
    assert run_of(folder)["complete"] is True
    assert tree_of(folder) == tree_of(clean)


def test_a_division_may_change_between_starts_but_not_at_once(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, some_rows: SomeRows, run_of: RunOf
) -> None:
    write_rows(some_rows(9))
    folder = Path(config().output_dir)
    for shard in ((0, 4), (2, 4)):
        with contextlib.suppress(StepError):
            extract(config(shard=shard), make_engine(fail_at_step=1, max_num_batched_tokens=40))
    journal = Journal(folder, (3, 4))
    with pytest.raises(UsageError, match="a process with --shard I/4 is at work"):
        extract(config(shard=(0, 2)), make_engine())
    with pytest.raises(UsageError, match="another process extracts shard 3/4"):
        extract(config(shard=(3, 4)), make_engine())
    journal.close()
    assert not extract(config(shard=(0, 2)), make_engine()).complete
    assert extract(config(), make_engine()).complete
    assert run_of(folder)["complete"] is True


@pytest.mark.parametrize("shard", [(-1, 2), (2, 2), (0, 0)])
def test_shards_that_cannot_be(config: MakeConfig, shard: Any) -> None:
    with pytest.raises(UsageError, match="shard must be"):
        config(shard=shard)
