"""The files beside the samples: each that is not what was written is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.unit.verify.conftest import words

from vllm_compat.errors import JournalError
from vllm_compat.extract.checksum import xxh3

if TYPE_CHECKING:
    from tests.unit.verify.conftest import MakeRun, Verify

NAME = "sample_lengths.json"
CONTENT = b'{"0": 12, "1": 7}'


def record_of(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Write ``run.json`` anew, changed."""
    record = json.loads((folder / "run.json").read_text())
    change(record)
    (folder / "run.json").write_text(json.dumps(record))


@pytest.fixture
def folder(make_run: MakeRun) -> Path:
    """A complete run with a sidecar more."""
    folder = make_run()
    (folder / NAME).write_bytes(CONTENT)
    written = {"file": NAME, "bytes": len(CONTENT), "xxh3": xxh3([CONTENT])}
    record_of(folder, lambda record: record["sidecars"].append(written))
    return folder


def test_sidecars_that_are_what_was_written(folder: Path, check: Verify) -> None:
    verdict = check(folder)
    assert (words(verdict), verdict.exit_code, verdict.notes) == ([], 0, ())
    assert [sidecar.file for sidecar in verdict.run.sidecars or ()] == ["draft_config.json", NAME]


@pytest.mark.parametrize(
    ("damage", "wanted"),
    [
        (lambda path: path.unlink(), "it is gone; the run wrote it when it was complete"),
        (lambda path: path.write_bytes(CONTENT[:-1]), "it has 16 bytes, 17 were written"),
        (
            lambda path: path.write_bytes(CONTENT.replace(b"12", b"13")),
            f"it is not what was written: its xxh3 is {xxh3([CONTENT.replace(b'12', b'13')])}, {xxh3([CONTENT])} was "
            "written",
        ),
        (lambda path: (path.unlink(), path.mkdir()), "it cannot be read: Is a directory"),
    ],
)
def test_a_sidecar_that_is_not_is_named(
    folder: Path, check: Verify, damage: Callable[[Path], Any], wanted: str
) -> None:
    damage(folder / NAME)
    verdict = check(folder)
    assert (words(verdict), verdict.exit_code, verdict.num_bad_samples) == ([f"{NAME}: {wanted}"], 5, 0)
    assert check(folder, samples=2, scan=False).exit_code == 0, "a quick look reads the samples alone"


def test_each_that_is_wrong_is_named_once(folder: Path, check: Verify) -> None:
    (folder / NAME).unlink()
    (folder / "draft_config.json").unlink()
    gone = "it is gone; the run wrote it when it was complete"
    assert words(check(folder)) == [f"draft_config.json: {gone}", f"{NAME}: {gone}"]
    (folder / "draft_config.json").write_text('{"eagle_aux_hidden_state_layer_ids": [3, 1] }\n')
    verdict = check(folder)
    assert words(verdict)[0].startswith("draft_config.json: it has 46 bytes, 45 were written"), "of the same contents"


def test_a_run_under_way_has_none_yet(folder: Path, check: Verify) -> None:
    record_of(folder, lambda record: record.update(complete=False))
    (folder / NAME).unlink()
    verdict = check(folder)
    assert (words(verdict), verdict.exit_code, verdict.notes) == ([], 75, ())


def test_a_run_of_an_earlier_release_is_verified_without(folder: Path, check: Verify) -> None:
    record_of(folder, lambda record: record.pop("sidecars"))
    (folder / NAME).unlink()
    verdict = check(folder)
    assert (words(verdict), verdict.exit_code) == ([], 0)
    assert verdict.notes == (
        "the run is of an earlier release, which kept no checksums of the files beside the samples: not compared",
    )
    (folder / "draft_config.json").unlink()
    assert words(check(folder)) == ["draft_config.json: it is gone; the run wrote it when it was complete"]


def test_the_depth_is_the_record_s(folder: Path, check: Verify) -> None:
    """Whatever has become of the model's folder."""
    record_of(folder, lambda record: record.update(num_layers=3))
    wanted = 'draft_config.json: it says {"eagle_aux_hidden_state_layer_ids": [3, 1]}, wanted {"eagle_aux_'
    assert words(check(folder))[0] == wanted + 'hidden_state_layer_ids": [1]}'


@pytest.mark.parametrize("sidecars", [3, [3], [{}], [{"file": "x", "bytes": None, "xxh3": ""}]])
def test_a_record_that_cannot_be_understood(folder: Path, check: Verify, sidecars: Any) -> None:
    record_of(folder, lambda record: record.update(sidecars=sidecars))
    with pytest.raises(JournalError, match="says what no run of this release says"):
        check(folder)


def test_every_file_of_an_arrow_dataset(make_run: MakeRun, check: Verify) -> None:
    for package in ("torch", "datasets"):
        pytest.importorskip(package)
    folder = make_run(layer_ids=(2, 0, 7), format="speculators", save_dtype="float32")
    assert check(folder).exit_code == 0
    names = [each["file"] for each in json.loads((folder / "run.json").read_text())["sidecars"]]
    assert len(names) == 5
    for name in names:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data + b" ")
        assert [text.partition(":")[0] for text in words(check(folder))] == [name]
        (folder / name).write_bytes(data)
