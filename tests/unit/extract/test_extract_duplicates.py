"""Samples with the same tokens go through the model once, and have files as if they had not."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pytest
from tests.unit.extract.test_extract_faults import FaultyOs, failure

from vllm_compat.errors import CaptureError, NonFiniteError, StepError, StoppedError
from vllm_compat.extract import Stop, Summary, extract, files
from vllm_compat.extract.copies import _Copier
from vllm_compat.extract.estimate import estimate_of
from vllm_compat.extract.inputs import Sample, check_input
from vllm_compat.extract.journal import Entry
from vllm_compat.extract.merging import DUPLICATES_FILE, may_merge, read_duplicates
from vllm_compat.testing import FakeEngine, FakeRequest
from vllm_compat.types import CapturedStates
from vllm_compat.verify.config import VerifyConfig
from vllm_compat.verify.prove import verify

if TYPE_CHECKING:
    from tests.unit.extract.conftest import MakeConfig, MakeEngine, Row, RunOf, SamplesIn, TreeOf, WriteRows

Tree: TypeAlias = tuple[dict[str, bytes], list[Entry]]
A, B, C = [1, 2, 3], [4, 5], [6] * 30
ROWS: list[Row] = [
    {"input_ids": A, "loss_mask": [0, 1, 1], "id": "a"},
    {"input_ids": B},
    {"input_ids": A, "id": "a again"},
    {"input_ids": [*A, 9], "loss_mask": [1, 1, 1, 0]},
    {"input_ids": C, "id": "c"},
    {"input_ids": A, "loss_mask": [1, 0, 0]},
    {"input_ids": B, "loss_mask": [0, 1], "id": "b again"},
]
COPIED = {2: 0, 5: 0, 6: 1}


class Counting(FakeEngine):
    """Knows which samples it was asked for."""

    asked: list[str]

    def make_request(self, *args: Any, **options: Any) -> FakeRequest:
        request = super().make_request(*args, **options)
        self.asked = [*getattr(self, "asked", []), request.request_id.removeprefix("sample-")]
        return request


def asked(engine: FakeEngine) -> list[int]:
    return sorted(map(int, getattr(engine, "asked", [])))


@pytest.fixture
def unmerged(config: MakeConfig, make_engine: MakeEngine, tree_of: TreeOf, tmp_path: Path) -> Callable[..., Tree]:
    """What a run has that computes every sample."""

    def run(**changes: Any) -> Tree:
        with pytest.MonkeyPatch.context() as patch:
            for module in ("plan", "folder"):
                patch.setattr(f"vllm_compat.extract.{module}.may_merge", lambda _: False)
            plain = config(output_dir=tmp_path / "unmerged", **changes)
            engine = make_engine(Counting, layer_ids=plain.layer_ids)
            assert not extract(plain, engine).copied
        assert asked(engine) == list(range(len(ROWS)))
        files, entries = tree_of(tmp_path / "unmerged")
        files.pop("state.json", None)
        return files, entries

    return run


def without_map(tree: Tree) -> Tree:
    files, entries = tree
    assert files.pop(DUPLICATES_FILE)
    files.pop("state.json", None)  # of a dataset, whose fingerprint is another each time
    return files, entries


FORMATS = [
    *("safetensors", "per-layer"),
    *(("speculators-v1", "specforge", "modelopt") if find_spec("torch") else ()),
    *(("speculators", "speculators-fp8") if find_spec("torch") and find_spec("datasets") else ()),
]


@pytest.mark.parametrize("form", FORMATS)
def test_files_are_those_of_a_run_that_computes_each(
    config: MakeConfig,
    make_engine: MakeEngine,
    write_rows: WriteRows,
    tree_of: TreeOf,
    unmerged: Callable[..., Tree],
    form: str,
) -> None:
    write_rows(ROWS)
    layer_ids = (0, 2, 4, 7 if form.startswith("speculators") else "norm")
    engine = make_engine(Counting, layer_ids=layer_ids)
    summary = extract(config(format=form, layer_ids=layer_ids, save_dtype="auto"), engine)
    assert (summary.samples, summary.copied, summary.complete) == (7, 3, True)
    assert summary.tokens == sum(len(row["input_ids"]) for row in ROWS)
    assert asked(engine) == [0, 1, 3, 4]
    folder = Path(str(config().output_dir))
    verdict = verify(VerifyConfig(folder))
    assert (verdict.num_problems, verdict.scan.good, verdict.input_why_not) == (0, 7, ""), verdict.first
    assert without_map(tree_of(folder)) == unmerged(format=form, layer_ids=layer_ids, save_dtype="auto")


def test_trees_are_equal_byte_by_byte(
    config: MakeConfig,
    make_engine: MakeEngine,
    write_rows: WriteRows,
    tree_of: TreeOf,
    unmerged: Callable[..., Tree],
    caplog: pytest.LogCaptureFixture,
) -> None:
    write_rows(ROWS)
    caplog.set_level("INFO", "vllm_compat")
    extract(config(), make_engine())
    assert without_map(tree_of(Path(str(config().output_dir)))) == unmerged()
    assert "of these 3 samples, 8 tokens are copies of others" in caplog.text
    assert "3 samples were made from files with the same tokens" in caplog.text


def test_what_is_cut_is_compared_after_the_cut(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows
) -> None:
    write_rows([{"input_ids": [*A, n]} for n in range(4)] + [{"input_ids": A}])
    engine = make_engine(Counting)
    assert extract(config(max_seq_len=3), engine).copied == 4
    assert asked(engine) == [0]


def test_samples_that_are_left_out_are_no_duplicates(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows
) -> None:
    write_rows([{"input_ids": [*A, 4]}, {"input_ids": A}, {"input_ids": [*A, 4]}, {"input_ids": A}])
    engine = make_engine(Counting)
    summary = extract(config(max_seq_len=3, overlong="skip"), engine)
    assert (summary.samples, summary.skipped, summary.overlong, summary.copied) == (4, 2, 2, 1)
    assert asked(engine) == [1]


@pytest.mark.parametrize("shards", [2, 3])
def test_an_original_is_of_the_same_shard(
    config: MakeConfig,
    make_engine: MakeEngine,
    write_rows: WriteRows,
    tree_of: TreeOf,
    unmerged: Callable[..., Tree],
    shards: int,
) -> None:
    write_rows(ROWS)
    alike = {2: [[0], [1, 3, 5]], 3: [[0, 3], [1, 4], [2]]}[shards]  # 5 is the first of its shard with A, 3 of 4 tokens
    for mine in range(shards):
        engine = make_engine(Counting)
        owed = [i for i in range(7) if i % shards == mine]
        firsts = {tuple(ROWS[i]["input_ids"]): i for i in reversed(owed)}
        summary = extract(config(shard=(mine, shards)), engine)
        assert asked(engine) == sorted(firsts.values())
        assert summary.copied == len(owed) - len(firsts)
        assert set(alike[mine]) <= set(asked(engine))
    assert without_map(tree_of(Path(str(config().output_dir)))) == unmerged()


def test_it_goes_on_in_the_middle_of_the_duplicates(
    config: MakeConfig,
    make_engine: MakeEngine,
    write_rows: WriteRows,
    tree_of: TreeOf,
    unmerged: Callable[..., Tree],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No engine is wanted then, and the input is not read through again."""
    write_rows(ROWS)
    folder = Path(str(config().output_dir))
    write, calls = _Copier._write, []

    def fails_at_the_second(self: _Copier, sample: Sample, entry: Entry) -> Entry | None:
        calls.append(sample.index)
        if len(calls) == 2:
            raise OSError("a test")
        return write(self, sample, entry)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("it was called")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Copier, "_write", fails_at_the_second)
        with pytest.raises(OSError, match="a test"):
            extract(config(writers=1), make_engine())
    assert calls[:2] == [2, 5]
    monkeypatch.setattr("vllm_compat.engine.open_engine", never)
    monkeypatch.setattr("vllm_compat.extract.plan.check_input", never)
    stop = Stop()
    stop.request("a test")
    with pytest.raises(StoppedError, match="5 of 7 samples are done"):
        extract(config(), stop=stop)
    summary = extract(config())
    assert (summary.complete, summary.copied, summary.kept) == (True, 2, 5)
    (folder / "hs_6.safetensors").unlink()
    again = extract(config())
    assert (again.complete, again.copied, again.kept) == (True, 1, 6)
    monkeypatch.undo()
    assert without_map(tree_of(folder)) == unmerged()


def test_a_lost_original_is_computed_and_then_copied(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, tree_of: TreeOf, unmerged: Callable[..., Tree]
) -> None:
    write_rows(ROWS)
    folder = Path(str(config().output_dir))
    extract(config(), make_engine())
    for index in (0, 5):
        (folder / f"hs_{index}.safetensors").unlink()
    engine = make_engine(Counting)
    assert extract(config(), engine).copied == 1
    assert asked(engine) == [0]
    assert without_map(tree_of(folder)) == unmerged()


@pytest.mark.parametrize("damage", ["gone", "cut", "other", "nonsense"])
def test_a_lost_map_is_made_again(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, damage: str, tree_of: TreeOf
) -> None:
    write_rows(ROWS)
    path = Path(str(config().output_dir)) / DUPLICATES_FILE
    with pytest.raises(StepError):
        extract(config(batch_size=1), make_engine(fail_at_step=2, max_num_seqs=1))
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    assert len(lines) == 3
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes({"cut": whole[:-4], "other": lines[0] + lines[2] + lines[1], "nonsense": b"x"}[damage])
    engine = make_engine(Counting)
    assert extract(config(), engine).copied == 3
    assert not set(asked(engine)) & set(COPIED)
    assert path.read_bytes() == whole


def test_a_damaged_original_is_copied_nowhere(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, samples_in: SamplesIn
) -> None:
    write_rows(ROWS)
    folder = Path(str(config().output_dir))
    extract(config(), make_engine())
    for index in COPIED:
        (folder / f"hs_{index}.safetensors").unlink()
    original = bytearray((folder / "hs_0.safetensors").read_bytes())
    original[-1] ^= 1
    (folder / "hs_0.safetensors").write_bytes(original)
    with pytest.raises(CaptureError, match=r"hs_0.* is not what was written, and sample 2 .* Remove the file"):
        extract(config(writers=1))
    assert "hs_2.safetensors" not in samples_in(folder)
    assert "hs_5.safetensors" not in samples_in(folder)
    (folder / "hs_0.safetensors").unlink()
    assert extract(config(), make_engine()).complete


def test_a_map_that_is_wrong_is_noticed(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two samples whose checksums are the same by chance are not the same."""
    monkeypatch.setattr("vllm_compat.extract.inputs.duplicates.xxh3_128", lambda data: len(data))
    write_rows([*ROWS[:6], {"input_ids": [5, 4]}])
    with pytest.raises(CaptureError, match=r"sample 6 \(line 7\) is said to have the tokens of sample 1") as caught:
        extract(config(), make_engine())
    assert caught.value.exit_code == 5


class NotFinite(Counting):
    """Gives sample 0 a NaN."""

    def get_captured_states(self, *, wait: bool = True) -> list[CapturedStates]:
        found = super().get_captured_states(wait=wait)
        for states in found:
            if states.request_id == "sample-0":
                states.hidden_states[1][-1, 3] = np.nan
        return found


def test_duplicates_of_a_skipped_sample_are_skipped(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, run_of: RunOf, samples_in: SamplesIn
) -> None:
    write_rows(ROWS)
    with pytest.raises(NonFiniteError):
        extract(config(), make_engine(NotFinite))
    summary = extract(config(on_nonfinite="skip"), make_engine(NotFinite))
    folder = Path(str(config().output_dir))
    assert (summary.complete, summary.skipped, summary.samples) == (True, 3, 7)
    assert samples_in(folder) == [f"hs_{n}.safetensors" for n in (1, 3, 4, 6)]
    why = "nonfinite: layer id 0: the state of token 2 is not finite"
    assert run_of(folder)["skipped"] == [{"index": n, "why": why} for n in (0, 2, 5)]


def test_runs_without_a_map_go_on_without_one(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, run_of: RunOf
) -> None:
    """As those that were begun before there was any."""
    write_rows(ROWS)
    folder = Path(str(config().output_dir))
    with pytest.raises(StepError):
        extract(config(batch_size=1), make_engine(fail_at_step=2, max_num_seqs=1))
    record = run_of(folder)
    for name in ("kind", "overlong", "num_left_out", "num_without_loss", "num_duplicates", "tokenizer"):
        del record["input"][name]
    (folder / "run.json").write_text(json.dumps(record))
    (folder / DUPLICATES_FILE).unlink()
    engine = make_engine(Counting)
    summary = extract(config(), engine)
    assert (summary.complete, summary.copied) == (True, 0)
    assert 6 in asked(engine)
    assert not (folder / DUPLICATES_FILE).exists()


def test_answers_that_are_drawn_are_not_merged(config: MakeConfig) -> None:
    assert may_merge(config())
    assert may_merge(config(generate=5))
    assert may_merge(config(generate=5, sampling={"temperature": 0.0, "seed": 7}))
    assert not may_merge(config(generate=5, sampling={"temperature": 0.7}))


def test_greedy_answers_are_copied_with_their_mask(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, tree_of: TreeOf, unmerged: Callable[..., Tree]
) -> None:
    write_rows([{name: value for name, value in row.items() if name != "loss_mask"} for row in ROWS])
    engine = make_engine(Counting)
    assert extract(config(generate=4), engine).copied == 3
    assert asked(engine) == [0, 1, 3, 4]
    assert without_map(tree_of(Path(str(config().output_dir)))) == unmerged(generate=4)


def test_the_estimate_tells_computed_from_copied(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows
) -> None:
    write_rows(ROWS)
    expected = estimate_of(config(), tokens_per_second=47 - 8)
    assert (expected.owed_samples, expected.owed_tokens) == (7, 47)
    assert (expected.copied_samples, expected.copied_tokens) == (3, 8)
    assert expected.hours.value == pytest.approx(1 / 3600)
    assert "39 tokens to be computed" in str(expected)
    sharded = estimate_of(config(shard=(0, 2)))
    assert (sharded.copied_samples, sharded.copied_tokens) == (1, 3)
    extract(config(), make_engine())
    assert estimate_of(config()).copied_samples == 0


def test_groups_are_those_of_equal_tokens(write_rows: WriteRows, tmp_path: Path) -> None:
    rng = random.Random(0)
    rows = [{"input_ids": [rng.randrange(3) for _ in range(rng.randrange(1, 5))]} for _ in range(600)]
    checked = check_input(write_rows(rows), max_tokens=3, find_duplicates=True)
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(tuple(row["input_ids"][:3]), []).append(index)
    expected = sorted((len(ids), members) for ids, members in groups.items() if len(members) > 1)
    assert checked.duplicates is not None
    assert sorted((count, list(members)) for count, members in checked.duplicates.groups()) == expected
    assert checked.num_duplicates == sum(len(members) - 1 for _, members in expected)
    assert read_duplicates(tmp_path, checked) is None


def test_copied_alone_are_summed(config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows) -> None:
    write_rows(ROWS)
    summary: Summary = extract(config(), make_engine())
    assert (summary.copied, summary.kept) == (3, 0)


def test_whatever_fails_the_same_command_goes_on_to_the_same_tree(
    config: MakeConfig,
    make_engine: MakeEngine,
    write_rows: WriteRows,
    tree_of: TreeOf,
    unmerged: Callable[..., Tree],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The map and each copy, too: every operation on the disk fails in turn."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    write_rows(ROWS)
    folder, wanted = Path(str(config().output_dir)), unmerged()
    for at in range(1000):
        shutil.rmtree(folder, ignore_errors=True)
        faulty = FaultyOs(at, "full", stays=True)
        with monkeypatch.context() as patch:
            patch.setattr(files, "os", faulty)
            error = failure(lambda: extract(config(writers=1), make_engine()))
        assert (error is None) == (not faulty.failed)
        assert extract(config(writers=1), make_engine()).complete
        assert without_map(tree_of(folder)) == wanted, f"operation {at}: {faulty.failed}"
        if not faulty.failed:
            break
    assert at > 10 * len(ROWS)
