"""The command line: what it prints, what it writes, and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.unit.verify.test_verify_lines import under_way

from vllm_compat.verify.cli import main

if TYPE_CHECKING:
    from tests.unit.verify.conftest import MakeRun


def spoil(folder: Path, *indices: int) -> None:
    for index in indices:
        path = folder / f"hs_{index}.safetensors"
        data = bytearray(path.read_bytes())
        data[-4] ^= 1  # of the last number's fraction
        path.write_bytes(data)


def test_a_good_run(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run()
    assert main([str(folder)]) == 0
    out = capsys.readouterr().out
    assert f"run         {folder}: 7 samples, layers 2 0 norm, format safetensors" in out
    assert "7 of 7 files are good" in out
    assert "compared with" in out
    assert "self-check  not done: " in out
    assert out.endswith("GOOD: all 7 samples\n")


def test_its_progress_goes_to_stderr(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_compat.extract.progress._EVERY_S", 0)
    assert main([str(make_run())]) == 0
    assert "INFO 7 of 7 samples, " in capsys.readouterr().err


def test_the_first_twenty_problems_are_printed_and_all_are_written(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(40)
    spoil(folder, *range(5, 35))
    assert main([str(folder), "--json", str(tmp_path / "all.json")]) == 5
    out = capsys.readouterr().out
    assert out.count("it is not what was written") == 20
    assert f"... and 10 more, all of them in {tmp_path / 'all.json'}" in out
    assert "30 problems, with 30 samples:" in out
    assert out.endswith("WRONG: this run is not right as it is\n")
    found = json.loads((tmp_path / "all.json").read_text())
    assert [problem["index"] for problem in found["problems"]] == list(range(5, 35))
    assert {"what", "file", "line"} < found["problems"][0].keys()
    assert (found["exit_code"], found["num_bad_samples"], found["scan"]["good"]) == (5, 30, 10)


def test_a_run_under_way(make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run()
    under_way(folder, 4)
    assert main([str(folder)]) == 75
    assert "NOT COMPLETE: 4 of 7 samples are done" in capsys.readouterr().out
    assert main([str(folder), "--partial", "--json", str(tmp_path / "json")]) == 0
    assert json.loads((tmp_path / "json").read_text())["problems"] == []


def test_no_scan_reads_what_is_chosen(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(40)
    spoil(folder, *range(40))
    assert main([str(folder), "--no-scan", "--samples", "3", "--seed", "1"]) == 5
    out = capsys.readouterr().out
    assert "0 of 3 files are good" in out
    assert "no more was read" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--jobs", "0"], "jobs must be at least 1"),
        (["--samples", "0"], "samples must be at least 1"),
        (["--bound", "2"], "bound must be above 0"),
        (["--picture", "a.png"], "give a model for that"),
        (["--prepared-data", "/nowhere"], "no such file"),
    ],
)
def test_what_cannot_be_meant(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main([str(make_run()), *arguments]) == (4 if "no such" in words else 2)
    assert words in capsys.readouterr().err


def test_no_run_and_a_record_that_was_changed(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 2
    assert "no run.json" in capsys.readouterr().err
    folder = make_run()
    record = json.loads((folder / "run.json").read_text())
    record["identity"]["layer_ids"] = ["first"]
    (folder / "run.json").write_text(json.dumps(record))
    assert main([str(folder)]) == 5
    (folder / "run.json").write_text("{")
    assert main([str(folder), "--json", str(tmp_path / "json")]) == 5
    assert "run.json" in capsys.readouterr().err
    assert "run.json" in json.loads((tmp_path / "json").read_text())["error"]


@pytest.mark.skipif(find_spec("torch") is not None, reason="torch is installed")
def test_a_model_that_nothing_can_be_made_of(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(make_run()), "--model", "nowhere"]) == 4
    out = capsys.readouterr().out
    assert "reference   not computed again: computing again takes torch and transformers" in out
    assert "NOT PROVEN" in out


def test_as_a_module_and_without_torch_or_vllm() -> None:
    code = (
        "import sys; from vllm_compat.verify.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'vllm', 'numpy', 'transformers', 'safetensors'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    done = subprocess.run([sys.executable, "-m", "vllm_compat.verify", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "Exit codes" in done.stdout
