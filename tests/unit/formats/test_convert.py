"""A run in another format: the same states bit by bit, in a folder that is a run itself."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.unit.formats.conftest import MakeRun

from vllm_compat.convert import ConvertConfig, convert
from vllm_compat.errors import CaptureError, JournalError, RunMismatchError, StoppedError, UsageError
from vllm_compat.extract import Stop
from vllm_compat.extract.done import SealedEntries
from vllm_compat.extract.spent import Spent
from vllm_compat.formats import FORMATS, SampleData, SampleFileError, get_format
from vllm_compat.testing import FakeEngine
from vllm_compat.types import CapturedStates, LayerId

PRE: tuple[LayerId, ...] = (1, 4, 5, 7)
POST: tuple[LayerId, ...] = (1, 4, 5, "norm")
IDS: dict[str, tuple[LayerId, ...]] = {
    "safetensors": PRE,
    "per-layer": PRE,
    "speculators": PRE,
    "speculators-v1": PRE,
    "specforge": POST,
    "modelopt": POST,
    "eagle": ("norm",),
}
NEEDS = {"speculators": ["datasets"], "speculators-fp8": ["datasets"]}


def need(name: str) -> None:
    for package in ("torch", "xxhash", *NEEDS.get(name, [])):
        if not importlib.util.find_spec(package):
            pytest.skip(f"{package} is not installed")


def record(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return found


def samples(folder: Path) -> list[SampleData]:
    """Every sample of a run, by its journal and its format; each file is the one that the journal has."""
    form = get_format(record(folder)["identity"]["format"])
    found = []
    for entry in SealedEntries(folder, record(folder)["identity"]["num_samples"]):
        if entry.file:
            assert (folder / entry.file).stat().st_size == entry.bytes
            found.append(form.decode(folder / entry.file, entry.index))
    return found


def same(left: SampleData, right: SampleData, layer_ids: tuple[LayerId, ...]) -> bool:
    """Whether ``right`` has the layers of ``left`` and everything else of it."""
    import torch

    at = [left.layer_ids.index(k) for k in layer_ids]
    return (
        (left.index, left.id, left.token_ids, left.loss_mask)
        == (right.index, right.id, right.token_ids, right.loss_mask)
        and right.layer_ids == layer_ids
        and torch.equal(left.hidden_states[:, at].view(torch.int16), right.hidden_states.view(torch.int16))
    )


def journal(folder: Path) -> list[str]:
    return (folder / "journal-0-of-1.jsonl").read_text().splitlines()


@pytest.mark.parametrize("name", IDS)
def test_there_and_back(make_run: MakeRun, tmp_path: Path, name: str) -> None:
    need(name)
    run, there, back = make_run((1, 4, 5, 7, "norm")), tmp_path / "there", tmp_path / "back"
    summary = convert(ConvertConfig(run, there, name, IDS[name]))
    assert (summary.samples, summary.complete, summary.kept) == (12, True, 0)
    convert(ConvertConfig(there, back, "safetensors"))
    originals = samples(run)
    for folder in (there, back):
        found = samples(folder)
        assert len(found) == 12
        assert all(same(a, b, IDS[name]) for a, b in zip(originals, found, strict=True))
        assert all(
            a.metadata["sampled_token"] == b.metadata["sampled_token"] for a, b in zip(originals, found, strict=True)
        )
    assert found[0].metadata["post_norm"] == json.dumps([k == "norm" for k in IDS[name]])


@pytest.mark.parametrize("name", FORMATS)
def test_the_result_is_a_run(make_run: MakeRun, tmp_path: Path, name: str) -> None:
    need(name)
    run, out = make_run(IDS.get(name, PRE)), tmp_path / "there"
    convert(ConvertConfig(run, out, name))
    before, after = record(run), record(out)
    assert after["complete"] is True
    assert after["identity"].pop("converted_from") == {"format": "safetensors", "layer_ids": list(IDS.get(name, PRE))}
    assert after["identity"] == before["identity"] | {"format": name}
    assert after["input"] == before["input"]
    assert after["summary"]["samples"] == 12
    strip = [json.loads(line[9:])["sampled"] for line in journal(run)]
    assert sorted(json.loads(line[9:])["sampled"] for line in journal(out)) == sorted(strip)
    assert not list(out.rglob(".*.tmp*"))


def test_sidecars(make_run: MakeRun, tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    need("speculators")
    run = make_run(PRE)
    (tmp_path / "data.jsonl").unlink()
    convert(ConvertConfig(run, tmp_path / "there", "speculators"))
    import torch

    datasets: Any = pytest.importorskip("datasets")
    found = datasets.load_from_disk(str(tmp_path / "there"))
    assert [row["input_ids"].tolist() for row in found] == [row["input_ids"] for row in rows]
    ones = [row.get("loss_mask", [1] * len(row["input_ids"])) for row in rows]
    assert [row["loss_mask"].tolist() for row in found] == ones
    frequency = torch.load(tmp_path / "there" / "token_freq.pt", weights_only=True)
    assert sum(frequency.values()) == sum(map(sum, ones))
    assert json.loads((tmp_path / "there" / "draft_config.json").read_text()) == {
        "eagle_aux_hidden_state_layer_ids": [2, 5, 6]
    }


@pytest.mark.parametrize("layer_ids", [(7,), (7, 1), (5, 4, 1, 7)])
def test_some_layers_in_another_order(make_run: MakeRun, tmp_path: Path, layer_ids: tuple[LayerId, ...]) -> None:
    run = make_run(PRE)
    convert(ConvertConfig(run, tmp_path / "there", "per-layer", layer_ids))
    assert all(same(a, b, layer_ids) for a, b in zip(samples(run), samples(tmp_path / "there"), strict=True))


@pytest.mark.parametrize(
    ("layer_ids", "have", "message"),
    [
        ((1, 2), PRE, r"no layer 2, only 1 4 5 7\. Extract again with --layer-ids 1 2$"),
        (POST, PRE, r"no layer norm, only 1 4 5 7\. .* can be computed from the last layer's with --model"),
        (PRE, POST, r"no layer 7, .*A norm cannot be undone: extract again with --layer-ids 1 4 5 7$"),
        (("norm",), (1, 2), r"no layer norm, only 1 2\. Extract again"),
    ],
)
def test_layers_that_are_not_there(
    make_run: MakeRun, tmp_path: Path, layer_ids: tuple[LayerId, ...], have: tuple[LayerId, ...], message: str
) -> None:
    run = make_run(have)
    with pytest.raises(UsageError, match=message):
        convert(ConvertConfig(run, tmp_path / "there", "safetensors", layer_ids))
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize(
    ("layer_ids", "message"), [((), "layer_ids is empty"), ((1, 1), "layer ids 1 1: one is there twice")]
)
def test_layer_ids_that_mean_nothing(layer_ids: tuple[LayerId, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ConvertConfig("a", "b", "safetensors", layer_ids)


def test_the_format_is_asked_first(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(PRE)
    with pytest.raises(UsageError, match="Use --layer-ids 1 4 5 norm"):
        convert(ConvertConfig(run, tmp_path / "there", "specforge"))
    assert not (tmp_path / "there").exists()


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no run\.json"):
        convert(ConvertConfig(tmp_path, tmp_path / "there", "safetensors"))


class _HalfAnEngine(FakeEngine):
    """Fails after a few steps."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options, max_num_batched_tokens=16, fail_at_step=6)


def test_a_run_that_is_not_complete(make_run: MakeRun, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="step"):
        make_run(PRE, _HalfAnEngine)
    run, out = tmp_path / "run", tmp_path / "there"
    done = len(journal(run))
    assert 0 < done < 12
    with pytest.raises(UsageError, match=rf"{done} of 12 samples are done, .* not sealed.*--partial"):
        convert(ConvertConfig(run, out, "safetensors"))
    assert not out.exists()
    summary = convert(ConvertConfig(run, out, "speculators-v1", partial=True))
    assert (summary.samples, summary.complete) == (done, False)
    assert record(out)["complete"] is False
    assert len(json.loads((out / "sample_lengths.json").read_text())) == done
    make_run(PRE)
    summary = convert(ConvertConfig(run, out, "speculators-v1"))
    assert (summary.samples, summary.complete, summary.kept) == (12, True, done)
    assert len(json.loads((out / "sample_lengths.json").read_text())) == 12
    assert all(same(a, b, PRE) for a, b in zip(samples(run), samples(out), strict=True))


def test_a_dataset_has_the_rows_that_are_not_done(
    make_run: MakeRun, tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    need("speculators")
    with pytest.raises(Exception, match="step"):
        make_run(PRE, _HalfAnEngine)
    run, out = tmp_path / "run", tmp_path / "there"
    convert(ConvertConfig(run, out, "speculators", partial=True))
    datasets: Any = pytest.importorskip("datasets")
    found = datasets.load_from_disk(str(out))
    assert [row["input_ids"].tolist() for row in found] == [row["input_ids"] for row in rows]
    (tmp_path / "data.jsonl").unlink()
    with pytest.raises(UsageError, match=r"a row for every sample.*gone or was changed: .*data\.jsonl"):
        convert(ConvertConfig(run, tmp_path / "other", "speculators", partial=True))


class _NotANumber(FakeEngine):
    """Its states of the row that has the id ``row-5`` are not finite."""

    def get_captured_states(self, **options: Any) -> list[CapturedStates]:
        found = super().get_captured_states(**options)
        for states in found:
            if states.request_id == "sample-5":
                states.hidden_states[0][0, 0] = float("nan")
        return found


def test_a_sample_that_was_skipped(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(PRE, _NotANumber, on_nonfinite="skip")
    out = tmp_path / "there"
    summary = convert(ConvertConfig(run, out, "speculators-v1"))
    assert (summary.samples, summary.skipped, summary.complete) == (12, 1, True)
    assert record(out)["skipped"] == record(run)["skipped"]
    assert not (out / "data_5.pt").exists()
    assert "5" not in json.loads((out / "sample_lengths.json").read_text())
    assert [entry.skipped for entry in SealedEntries(out, 12) if entry.index == 5] == [
        entry.skipped for entry in SealedEntries(run, 12) if entry.index == 5
    ]


@pytest.mark.parametrize("where", ["header", "states", "last"])
def test_a_bit_that_flipped(make_run: MakeRun, tmp_path: Path, where: str) -> None:
    run, out = make_run(PRE), tmp_path / "there"
    path = run / "hs_7.safetensors"
    raw = bytearray(path.read_bytes())
    raw[{"header": 9, "states": len(raw) - 20, "last": len(raw) - 1}[where]] ^= 1
    path.write_bytes(raw)
    with pytest.raises(SampleFileError, match=r"sample 7: .*hs_7\.safetensors is not what was written") as caught:
        convert(ConvertConfig(run, out, "speculators-v1"))
    assert caught.value.exit_code == 5
    assert len(journal(out)) == 7
    assert record(out)["complete"] is False


def test_a_file_that_is_gone(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(PRE)
    (run / "hs_3.safetensors").unlink()
    with pytest.raises(UsageError, match="11 of 12 samples are done"):
        convert(ConvertConfig(run, tmp_path / "there", "per-layer"))
    assert convert(ConvertConfig(run, tmp_path / "there", "per-layer", partial=True)).samples == 11


def test_a_journal_that_was_changed(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(PRE)
    path = run / "journal-0-of-1.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"tokens":1', b'"tokens":2', 1))
    with pytest.raises(JournalError):
        convert(ConvertConfig(run, tmp_path / "there", "per-layer"))


class _StopAfter:
    """Progress that asks for the end after some samples."""

    def __init__(self, count: int) -> None:
        self.stop = Stop()
        self._left = count

    def __call__(self, total: int) -> _StopAfter:
        return self

    def advance(self, tokens: int, size: int, spent: Spent | None = None) -> None:
        self._left -= 1
        if self._left == 0:
            self.stop.request("SIGTERM")

    def close(self) -> None:
        pass


@pytest.mark.parametrize("name", ["speculators-v1", "safetensors"])
def test_it_goes_on_where_it_was_stopped(make_run: MakeRun, tmp_path: Path, name: str) -> None:
    run, out, whole = make_run(PRE), tmp_path / "there", tmp_path / "whole"
    config = ConvertConfig(run, out, name)
    for done in (4, 9):
        progress = _StopAfter(4 if done == 4 else 5)
        with pytest.raises(StoppedError, match=rf"SIGTERM: {done} of 12 samples are converted") as caught:
            convert(config, progress, progress.stop)
        assert caught.value.exit_code == 75
        assert len(journal(out)) == done
        assert record(out)["complete"] is False
    summary = convert(config)
    assert (summary.samples, summary.kept, summary.complete) == (12, 9, True)
    convert(ConvertConfig(run, whole, name))
    assert {path.relative_to(out): path.read_bytes() for path in out.glob("[dh]*")} == {
        path.relative_to(whole): path.read_bytes() for path in whole.glob("[dh]*")
    }
    assert journal(out) == journal(whole)
    inodes = {path: path.stat().st_ino for path in out.glob("*_[0-9]*")}
    assert convert(config).kept == 12
    assert {path: path.stat().st_ino for path in out.glob("*_[0-9]*")} == inodes, "written once"


def test_a_file_of_the_result_that_was_lost(make_run: MakeRun, tmp_path: Path) -> None:
    run, out = make_run(PRE), tmp_path / "there"
    convert(ConvertConfig(run, out, "safetensors"))
    (out / "hs_4.safetensors").unlink()
    summary = convert(ConvertConfig(run, out, "safetensors"))
    assert (summary.kept, summary.samples, summary.complete) == (11, 12, True)
    assert all(same(a, b, PRE) for a, b in zip(samples(run), samples(out), strict=True))


@pytest.mark.parametrize(
    ("changes", "fields"),
    [({"format": "per-layer"}, ("format",)), ({"layer_ids": (1, 7)}, ("layer_ids",))],
)
def test_a_folder_of_another_conversion(
    make_run: MakeRun, tmp_path: Path, changes: dict[str, Any], fields: tuple[str, ...]
) -> None:
    run, out = make_run(PRE), tmp_path / "there"
    convert(ConvertConfig(run, out, "safetensors"))
    options: dict[str, Any] = {"run_dir": run, "output_dir": out, "format": "safetensors"} | changes
    with pytest.raises(RunMismatchError) as caught:
        convert(ConvertConfig(**options))
    assert caught.value.fields == fields
    assert record(out)["complete"] is True


def test_a_folder_with_samples_of_no_run(make_run: MakeRun, tmp_path: Path) -> None:
    run, out = make_run(PRE), tmp_path / "there"
    out.mkdir()
    (out / "hs_3.safetensors").write_bytes(b"mine")
    with pytest.raises(UsageError, match=r"samples of no run that is known \(hs_3\.safetensors\)"):
        convert(ConvertConfig(run, out, "safetensors"))
    assert sorted(path.name for path in out.iterdir()) == [".lock", "hs_3.safetensors"]


@pytest.mark.parametrize("out", [".", "inside", ".."])
def test_folders_in_one_another(make_run: MakeRun, out: str) -> None:
    run = make_run(PRE)
    before = sorted(path.name for path in run.iterdir())
    with pytest.raises(UsageError, match="must not be in one another"):
        convert(ConvertConfig(run, run / out, "per-layer"))
    assert sorted(path.name for path in run.iterdir()) == before


def test_a_file_that_no_reader_would_take_for_a_sample(make_run: MakeRun, tmp_path: Path) -> None:
    """speculators 0.3 to 0.7 take every name in the tree that ends in ``pt`` for a sample."""
    run, out = make_run(PRE), tmp_path / "there"
    convert(ConvertConfig(run, out, "speculators-v1"))
    names = [name for _, _, names in os.walk(out) for name in names if name.endswith("pt")]
    assert sorted(names) == sorted(f"data_{i}.pt" for i in range(12))


def test_errors_of_the_format_are_of_integrity() -> None:
    assert issubclass(SampleFileError, CaptureError)
