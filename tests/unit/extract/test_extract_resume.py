"""The same command again goes on; another command is refused, and by name."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from vllm_compat.errors import JournalError, RunMismatchError, StepError, UsageError
from vllm_compat.extract import extract
from vllm_compat.extract.done import SealedEntries
from vllm_compat.extract.folder import open_run
from vllm_compat.extract.journal import read_journal
from vllm_compat.extract.plan import make_plan
from vllm_compat.extract.record import versions
from vllm_compat.extract.rows import parse_line
from vllm_compat.formats import get_format
from vllm_compat.testing import FakeEngine

if TYPE_CHECKING:
    from tests.unit.extract.conftest import MakeConfig, MakeEngine, Row, RunOf, SomeRows, TreeOf, WriteRows

JOURNAL = "journal-0-of-1.jsonl"


class Counted(FakeEngine):
    """Notes the requests that it was given."""

    asked: list[str]

    def make_request(self, *args: Any, **options: Any) -> Any:
        self.asked = [*getattr(self, "asked", []), options["request_id"]]
        return super().make_request(*args, **options)


@pytest.mark.parametrize("step", [0, 1, 4, 9])
def test_a_run_goes_on_where_it_was_ended(
    config: MakeConfig,
    make_engine: MakeEngine,
    write_rows: WriteRows,
    some_rows: SomeRows,
    tree_of: TreeOf,
    run_of: RunOf,
    caplog: pytest.LogCaptureFixture,
    step: int,
) -> None:
    caplog.set_level(logging.INFO, "vllm_compat")
    write_rows(some_rows(20))
    clean = config(output_dir=Path(config().output_dir).with_name("clean"))
    extract(clean, make_engine())
    with pytest.raises(StepError):
        extract(config(), make_engine(fail_at_step=step, max_num_batched_tokens=48))
    folder = Path(config().output_dir)
    kept = len(list(read_journal(folder / JOURNAL, 20)))
    assert run_of(folder)["complete"] is False
    engine = make_engine(Counted)
    summary = extract(config(batch_size=7, tensor_parallel_size=4, gpu_memory_utilization=0.1), engine)
    assert isinstance(engine, Counted)
    assert len(engine.asked) == 20 - kept
    assert (summary.samples, summary.kept, summary.complete) == (20, kept, True)
    assert summary.bytes == sum(path.stat().st_size for path in folder.glob("hs_*"))
    assert summary.tokens == sum(len(row["input_ids"]) for row in some_rows(20))
    assert tree_of(folder) == tree_of(Path(clean.output_dir))
    assert (f"{kept} samples are done already; {20 - kept} are to be done" in caplog.text) == (kept > 0)


@pytest.mark.usefixtures("no_engine")
def test_a_complete_run_is_left_as_it_is(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, some_rows: SomeRows, tree_of: TreeOf
) -> None:
    write_rows(some_rows(5))
    first = extract(config(), make_engine())
    folder = Path(config().output_dir)
    before, record = tree_of(folder), (folder / "run.json").read_bytes()
    again = extract(config())
    assert (again.samples, again.tokens, again.bytes, again.complete) == (5, first.tokens, first.bytes, True)
    assert (again.kept, again.seconds, again.tokens_per_second) == (5, 0, 0)
    assert tree_of(folder) == before
    assert (folder / "run.json").read_bytes() == record


@pytest.mark.parametrize("how", ["gone", "short", "long"])
def test_holes_are_refilled(
    config: MakeConfig,
    make_engine: MakeEngine,
    write_rows: WriteRows,
    some_rows: SomeRows,
    tree_of: TreeOf,
    run_of: RunOf,
    caplog: pytest.LogCaptureFixture,
    how: str,
) -> None:
    write_rows(some_rows(6))
    extract(config(), make_engine())
    folder = Path(config().output_dir)
    before = tree_of(folder)
    for index in (1, 4):
        path = folder / f"hs_{index}.safetensors"
        content = path.read_bytes()
        path.unlink()
        if how != "gone":
            path.write_bytes(content[:-1] if how == "short" else content + b"x")
    engine = make_engine(Counted, fail_at_step=1, max_num_batched_tokens=30)
    with pytest.raises(StepError):
        extract(config(), engine)
    assert run_of(folder)["complete"] is False
    assert "summary" not in run_of(folder)
    assert "2 files of a complete run are gone; they are made again" in caplog.text
    assert isinstance(engine, Counted)
    assert engine.asked == ["sample-1", "sample-4"]
    assert extract(config(), make_engine()).complete
    assert tree_of(folder) == before
    lines = [entry for _, entry in read_journal(folder / JOURNAL, 6)]
    assert sorted(e.index for e in lines) == [0, 1, 1, 2, 3, 4, 4, 5]
    assert [(e.index, e.again > 0) for e in lines[6:]] in ([(1, True), (4, True)], [(4, True), (1, True)])


def test_the_line_of_a_refill_counts_whatever_the_order_of_the_journals(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, some_rows: SomeRows
) -> None:
    """Sorted by name, the journal of the second run comes before that of the first."""
    write_rows(some_rows(4))
    folder = Path(config().output_dir)
    for shard in ((0, 2), (1, 2)):
        extract(config(shard=shard), make_engine())
    (folder / "hs_3.safetensors").unlink()
    assert extract(config(), make_engine()).complete
    assert [entry.again for entry in SealedEntries(folder, 4)] == [0, 0, 0, 1]


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"layer_ids": (0, 2, "norm")}, ("layer_ids",)),
        ({"max_seq_len": 63}, ("max_seq_len",)),
        ({"save_dtype": "float32"}, ("save_dtype",)),
        ({"dtype": "float16"}, ("dtype",)),
        ({"num_samples": 3}, ("num_samples", "input_xxh3")),
        ({"engine_options": {"quantization": "fp8"}}, ("engine_options",)),
        ({"save_dtype": "auto", "dtype": "float32"}, ("dtype", "save_dtype")),
    ],
)
def test_another_run_is_refused_by_name(
    config: MakeConfig,
    make_engine: MakeEngine,
    write_rows: WriteRows,
    some_rows: SomeRows,
    tree_of: TreeOf,
    changes: dict[str, Any],
    fields: tuple[str, ...],
) -> None:
    write_rows(some_rows(5))
    with pytest.raises(StepError):
        extract(config(), make_engine(max_num_seqs=1, fail_at_step=3))
    folder = Path(config().output_dir)
    before = tree_of(folder)
    with pytest.raises(RunMismatchError) as caught:
        extract(config(**changes))
    assert caught.value.fields == fields
    assert caught.value.exit_code == 2
    assert all(f"{name} is " in str(caught.value) for name in fields)
    assert "another output folder" in str(caught.value)
    assert tree_of(folder) == before


@pytest.mark.usefixtures("no_engine")
def test_another_input_or_model_is_refused_by_name(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, some_rows: SomeRows, model: Path
) -> None:
    rows = some_rows(5)
    path = write_rows(rows)
    with pytest.raises(StepError):
        extract(config(), make_engine(max_num_seqs=1, fail_at_step=3))
    rows[2]["input_ids"][0] ^= 1
    write_rows(rows)
    with pytest.raises(RunMismatchError, match="input_xxh3 is") as caught:
        extract(config())
    assert caught.value.fields == ("input_xxh3",)
    rows[2]["input_ids"][0] ^= 1
    write_rows(rows)
    (model / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(RunMismatchError) as caught:
        extract(config())
    assert caught.value.fields == ("model_revision",)
    moved = path.rename(path.with_name("moved.jsonl"))
    (model / "model.safetensors").unlink()
    assert extract(config(prepared_data=moved), make_engine()).complete, "the same lines in another file are the same"


def test_a_run_that_came_to_nothing_gives_way(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, some_rows: SomeRows, run_of: RunOf
) -> None:
    """What a failed rehearsal or load leaves must not stand in the way of the corrected settings."""
    write_rows(some_rows(5))
    with pytest.raises(StepError):
        extract(config(layer_ids=(3,), format="per-layer"), make_engine(layer_ids=(3,), fail_at_step=1))
    assert extract(config(), make_engine()).complete
    assert run_of(Path(config().output_dir))["identity"]["layer_ids"] == [2, 0, "norm"]


def test_a_run_that_is_at_work_does_not_give_way(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, some_rows: SomeRows
) -> None:
    write_rows(some_rows(5))
    settings = config(shard=(0, 2))
    with open_run(make_plan(settings), settings), pytest.raises(RunMismatchError):
        extract(config(shard=(1, 2), layer_ids=(3,)), make_engine(layer_ids=(3,)))


def test_a_sample_without_a_line_does_not_give_way(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, some_rows: SomeRows
) -> None:
    """Killed between the first file and its line: other settings would leave it there, under whatever name."""
    write_rows(some_rows(5))
    with pytest.raises(StepError):
        extract(config(), make_engine(fail_at_step=1))
    written = Path(config().output_dir, get_format("speculators").file(3, None))
    written.parent.mkdir(exist_ok=True)
    written.write_bytes(b"states")
    with pytest.raises(UsageError, match="already has samples of an earlier run"):
        extract(config(layer_ids=(3,)), make_engine(layer_ids=(3,)))


def test_options_that_leave_the_result_alone_may_differ(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, some_rows: SomeRows
) -> None:
    write_rows(some_rows(5))
    with pytest.raises(StepError):
        extract(config(engine_options={"seed": 1}), make_engine(fail_at_step=1))
    changes = {"engine_options": {"seed": 1, "swap_space": 4}, "on_nonfinite": "skip", "writers": 1, "num_samples": 5}
    assert extract(config(**changes), make_engine()).complete


def test_the_input_is_read_through_once_as_long_as_nobody_touches_it(
    config: MakeConfig,
    make_engine: MakeEngine,
    write_rows: WriteRows,
    some_rows: SomeRows,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = write_rows(some_rows(9))
    parsed: list[bytes] = []

    def counted(raw: bytes) -> object:
        parsed.append(raw)
        return parse_line(raw)

    monkeypatch.setattr("vllm_compat.extract.inputs.jsonl.parse_line", counted)
    with pytest.raises(StepError):
        extract(config(), make_engine(fail_at_step=1))
    kept = len(list(read_journal(Path(config().output_dir) / JOURNAL, 9)))
    parsed.clear()
    extract(config(), make_engine())
    assert len(parsed) == 9 - kept, "no second check, and no line of a sample that is done"
    parsed.clear()
    os.utime(path)
    extract(config(), make_engine())
    assert len(parsed) == 9, "checked again, with the same result"
    parsed.clear()
    extract(config(), make_engine())
    assert not parsed, "and once is enough"


def test_what_a_killed_process_left_is_swept_away(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, some_rows: SomeRows
) -> None:
    write_rows(some_rows(3))
    with pytest.raises(StepError):
        extract(config(), make_engine(fail_at_step=0))
    folder = Path(config().output_dir)
    dead = [".hs_1.tmp-0-of-1-0123abcd", ".run.tmp-run-0123abcd", ".hs_1.tmp-3-of-4-0123abcd"]
    others = [".hidden", "notes.txt", ".hs_1.tmp-0-of-1-0123abcd.pt"]
    for name in (*dead, *others):
        (folder / name).write_bytes(b"half")
    (folder / "hs_1.safetensors").write_bytes(b"renamed, and its line never written")
    assert extract(config(), make_engine()).complete
    assert not [name for name in dead if (folder / name).exists()]
    assert all((folder / name).exists() for name in others)


def test_a_changed_journal_or_record_starts_nothing(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, some_rows: SomeRows
) -> None:
    write_rows(some_rows(3))
    extract(config(), make_engine())
    folder = Path(config().output_dir)
    journal, record = folder / JOURNAL, folder / "run.json"
    good = journal.read_bytes()
    journal.write_bytes(good.replace(b'"tokens":', b'"tokens":1', 1))
    with pytest.raises(JournalError, match="line 1 is not what was written"):
        extract(config())
    journal.write_bytes(good)
    text = record.read_text()
    for content in ("", "{", "[]", "{}", '{"complete": 1, "identity": {}, "input": {}}', '{"complete": true}'):
        record.write_text(content)
        with pytest.raises(JournalError, match=r"run\.json is not a run's record of this release"):
            extract(config())
    record.unlink()
    with pytest.raises(UsageError, match=r"already has samples of an earlier run .* and no record"):
        extract(config())
    for path in folder.glob("hs_*"):
        path.unlink()
    with pytest.raises(UsageError, match=r"\(journal-0-of-1\.jsonl\) and no record"):
        extract(config())
    record.write_text(text)
    assert extract(config(), make_engine()).complete


def test_another_vllm_is_told(
    config: MakeConfig,
    make_engine: MakeEngine,
    write_rows: WriteRows,
    some_rows: SomeRows,
    run_of: RunOf,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write_rows(some_rows(3))
    with pytest.raises(StepError):
        extract(config(), make_engine(fail_at_step=0))
    folder = Path(config().output_dir)
    run = run_of(folder) | {"vllm_version": "0.11.0"}
    (folder / "run.json").write_text(json.dumps(run))
    assert extract(config(), make_engine()).complete
    assert f"begun with vLLM 0.11.0, and {versions()['vllm_version']} is installed" in caplog.text


def test_rows_may_be_more_than_one_run_needs(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, some_rows: SomeRows
) -> None:
    """What comes after the samples of a run does not change what it is."""
    rows: list[Row] = some_rows(6)
    write_rows(rows[:4])
    with pytest.raises(StepError):
        extract(config(num_samples=4), make_engine(fail_at_step=1))
    write_rows(rows)
    assert extract(config(num_samples=4), make_engine()).samples == 4
