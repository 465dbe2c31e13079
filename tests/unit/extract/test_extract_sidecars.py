"""``run.json`` at the end: what lies beside the samples, and how many layers the model has."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from vllm_compat.convert import ConvertConfig, convert
from vllm_compat.errors import JournalError
from vllm_compat.extract import extract
from vllm_compat.extract.checksum import xxh3
from vllm_compat.extract.journal import Entry
from vllm_compat.extract.record import read_record
from vllm_compat.extract.sidecars import write_sidecars
from vllm_compat.formats import SampleRow, SealedRun, get_format
from vllm_compat.testing import FakeEngine
from vllm_compat.types import StepResult

if TYPE_CHECKING:
    from tests.unit.extract.conftest import MakeConfig, MakeEngine, RunOf, SomeRows, WriteRows


class Broken(FakeEngine):
    """Fails in its first step."""

    def run_step(self, meanwhile: Any = None) -> StepResult:
        raise RuntimeError


def as_they_are(folder: Path, *names: str) -> list[dict[str, Any]]:
    contents = {name: (folder / name).read_bytes() for name in names}
    return [{"file": name, "bytes": len(data), "xxh3": xxh3([data])} for name, data in contents.items()]


def test_each_sidecar_has_its_size_and_digest(tmp_path: Path) -> None:
    entries = [Entry(0, "data_0.pt", 3, "0" * 16, 5, 1), Entry(1, "", 0, "", 5, 1, skipped="nonfinite")]
    run = SealedRun(entries, lambda: iter(()), 2, (2, 30, 58, 60), 61, "m", {})
    found = write_sidecars(tmp_path, get_format("speculators-v1"), run)
    assert [dataclasses.asdict(each) for each in found] == as_they_are(
        tmp_path, "draft_config.json", "sample_lengths.json"
    )
    assert write_sidecars(tmp_path, get_format("safetensors"), dataclasses.replace(run, num_layers=None)) == ()


def test_every_sidecar_of_speculators_is_named(tmp_path: Path) -> None:
    for package in ("torch", "datasets"):
        pytest.importorskip(package)
    run = SealedRun((), lambda: iter([SampleRow((5, 6), None)]), 1, (2, 30, 58, 60), 61, "m", {})
    found = {each.file for each in write_sidecars(tmp_path, get_format("speculators"), run)}
    assert found == {path.name for path in tmp_path.iterdir()}
    assert {"token_freq.pt", "state.json", "dataset_info.json", "data-00000-of-00001.arrow"} < found


def test_a_run_has_them_from_the_seal_on(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, some_rows: SomeRows, run_of: RunOf
) -> None:
    write_rows(some_rows(4))
    folder = Path(config().output_dir)
    extract(config(shard=(0, 2)), make_engine())
    assert "sidecars" not in run_of(folder)
    extract(config(shard=(1, 2)), make_engine())
    assert run_of(folder)["sidecars"] == as_they_are(folder, "draft_config.json")

    (folder / "hs_2.safetensors").unlink()
    (folder / "hs_1.safetensors").unlink()
    extract(config(shard=(0, 2)), make_engine())
    reopened = run_of(folder)
    assert (reopened["complete"], {"sidecars", "summary"} & reopened.keys()) == (False, set())


def test_the_depth_is_there_once_it_is_known(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, some_rows: SomeRows, run_of: RunOf
) -> None:
    write_rows(some_rows(4))
    with pytest.raises(RuntimeError):
        extract(config(), make_engine(Broken))
    begun = run_of(Path(config().output_dir))
    assert (begun["complete"], begun["num_layers"]) == (False, 8), "as config.json says"

    folder = Path(config().output_dir) / "of a model elsewhere"
    unknown = config(output_dir=folder, model="some/name")
    with pytest.raises(RuntimeError):
        extract(unknown, make_engine(Broken))
    assert "num_layers" not in run_of(folder)
    extract(unknown, make_engine())
    assert run_of(folder)["num_layers"] == 8, "as the engine says"
    (folder / "run.json").write_text(json.dumps(run_of(folder) | {"complete": False}))
    (folder / "draft_config.json").unlink()
    extract(unknown)  # nothing is owed, so there is no engine to ask
    assert run_of(folder)["num_layers"] == 8
    assert (folder / "draft_config.json").exists()


def test_a_record_of_an_earlier_release_gets_it(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, some_rows: SomeRows, run_of: RunOf
) -> None:
    write_rows(some_rows(4))
    extract(config(), make_engine())
    path = Path(config().output_dir) / "run.json"
    before = run_of(path.parent)
    path.write_text(json.dumps({name: value for name, value in before.items() if name != "num_layers"}))
    assert read_record(path.parent).num_layers is None  # type: ignore[union-attr]
    extract(config())
    assert run_of(path.parent) == before
    path.write_text(json.dumps(before | {"num_layers": "8"}))
    with pytest.raises(JournalError, match="num_layers '8'"):
        read_record(path.parent)


def test_a_conversion_takes_the_depth_from_the_run(
    config: MakeConfig,
    make_engine: MakeEngine,
    write_rows: WriteRows,
    some_rows: SomeRows,
    run_of: RunOf,
    model: Path,
    tmp_path: Path,
) -> None:
    """The model's folder need not be there any more."""
    write_rows(some_rows(4))
    extract(config(layer_ids=(2, 0, 7), save_dtype="float32"), make_engine(layer_ids=(2, 0, 7)))
    (model / "config.json").unlink()
    folder = Path(config().output_dir)
    convert(ConvertConfig(folder, tmp_path / "there", "per-layer"))
    after = run_of(tmp_path / "there")
    assert after["num_layers"] == 8
    assert after["sidecars"] == run_of(folder)["sidecars"] == as_they_are(tmp_path / "there", "draft_config.json")
    assert json.loads((tmp_path / "there" / "draft_config.json").read_text()) == {
        "eagle_aux_hidden_state_layer_ids": [3, 1]
    }
    path = folder / "run.json"
    path.write_text(json.dumps({name: value for name, value in run_of(folder).items() if name != "num_layers"}))
    convert(ConvertConfig(folder, tmp_path / "unknown", "per-layer"))
    assert "num_layers" not in run_of(tmp_path / "unknown")
    assert run_of(tmp_path / "unknown")["sidecars"] == []
