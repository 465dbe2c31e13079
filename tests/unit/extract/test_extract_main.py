"""The command, from arguments to exit code, with a fake engine in the place of vLLM's."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import vllm_compat.engine
from vllm_compat.errors import UnsupportedModelError
from vllm_compat.extract import ExtractConfig
from vllm_compat.extract.__main__ import main
from vllm_compat.extract.plan import Plan
from vllm_compat.extract.rehearsal import RehearsalError
from vllm_compat.testing import FakeEngine
from vllm_compat.types import StepResult

if TYPE_CHECKING:
    from tests.unit.extract.conftest import MakeEngine, Read, StatesOf, WriteRows

Arguments = Callable[..., list[str]]


@pytest.fixture
def arguments(tmp_path: Path, model: Path) -> Arguments:
    def make(*more: str) -> list[str]:
        required = ["--model-path", str(model), "--prepared-data", str(tmp_path / "data.jsonl")]
        return [*required, "--output-dir", str(tmp_path / "out"), "--no-rehearsal", *more]

    return make


@pytest.fixture
def engines(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Opens fake engines; the list gets the options that each was opened with."""
    opened: list[dict[str, Any]] = []

    def open_engine(model: str, **options: Any) -> FakeEngine:
        opened.append({"model": model, **options})
        print("noise, as the engine logs to stdout", flush=True)
        os.write(1, b"noise of a worker\n")
        return make_engine(layer_ids=options["layer_ids"], max_model_len=options["max_model_len"])

    monkeypatch.setattr(vllm_compat.engine, "open_engine", open_engine)
    return opened


def test_end_to_end(
    arguments: Arguments,
    engines: list[dict[str, Any]],
    write_rows: WriteRows,
    read: Read,
    states_of: StatesOf,
    tmp_path: Path,
    model: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    write_rows([{"input_ids": [5, 6, 7]}, {"input_ids": [8]}])
    line = "--batch-size 2 --max-seq-len 2048 --tp_size 8 --gpu-memory-utilization 0.80 --layer-ids 2 3 norm --json"
    assert main(arguments(*line.split())) == 0
    out, err = capfd.readouterr()
    summary = json.loads(out)
    assert summary["samples"] == 2
    assert summary["tokens"] == 4
    assert summary["output_dir"] == str(tmp_path / "out")
    assert "noise, as the engine logs" in err
    assert "noise of a worker" in err
    assert "samples: 2, 4 tokens" in err
    [options] = engines
    assert options["model"] == str(model)
    assert (options["tensor_parallel_size"], options["max_num_seqs"], options["max_model_len"]) == (8, 2, 2049)
    tensors, _ = read(tmp_path / "out" / "hs_0.safetensors")
    assert np.array_equal(tensors["hidden_states"], states_of([5, 6, 7], (2, 3, "norm")))


@pytest.mark.usefixtures("engines")
def test_default_layers_and_no_json(
    arguments: Arguments, write_rows: WriteRows, read: Read, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_rows([{"input_ids": [5]}])
    assert main(arguments()) == 0
    assert capfd.readouterr().out == "noise, as the engine logs to stdout\nnoise of a worker\n"
    assert read(tmp_path / "out" / "hs_0.safetensors")[1]["layer_ids"] == "[2, 4, 5, 7]"


def test_nothing_is_left_behind_in_the_process(
    arguments: Arguments, engines: list[dict[str, Any]], write_rows: WriteRows, capfd: pytest.CaptureFixture[str]
) -> None:
    write_rows([{"input_ids": [5]}])
    logger = logging.getLogger("vllm_compat")
    before = list(logger.handlers), logger.propagate
    root = logging.StreamHandler(sys.stderr)
    logging.getLogger().addHandler(root)
    try:
        assert main(arguments("--json")) == 0
    finally:
        logging.getLogger().removeHandler(root)
    assert len(engines) == 1
    assert (list(logger.handlers), logger.propagate) == before
    assert capfd.readouterr().err.count("all 1 samples are written") == 1, "a handler of the root repeats no line"
    print("after")
    os.write(1, b"and below")
    assert capfd.readouterr().out == "after\nand below"


@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize(
    ("rows", "more", "code", "words"),
    [
        ([{"input_ids": [1]}], ["--layer-ids", "8"], 2, "error: layer id 8 is out of range"),
        ([{"input_ids": [1]}], ["--batch-size", "0"], 2, "error: batch_size must be at least 1"),
        ([{"input_ids": []}], [], 4, "line 1: input_ids is empty"),
        ([], [], 4, "there is no sample in the file"),
    ],
)
def test_errors_and_exit_codes(
    arguments: Arguments,
    write_rows: WriteRows,
    capfd: pytest.CaptureFixture[str],
    rows: list[Any],
    more: list[str],
    code: int,
    words: str,
) -> None:
    write_rows(rows)
    assert main(arguments("--json", *more)) == code
    out, err = capfd.readouterr()
    assert out == ""
    assert words in err


def test_an_error_of_the_engine(
    arguments: Arguments, write_rows: WriteRows, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows([{"input_ids": [1]}])

    def open_engine(*_: object, **__: object) -> FakeEngine:
        raise UnsupportedModelError("no layers found")

    monkeypatch.setattr(vllm_compat.engine, "open_engine", open_engine)
    assert main(arguments()) == 3
    assert "error: no layers found" in capfd.readouterr().err


def test_an_interrupt(
    arguments: Arguments,
    write_rows: WriteRows,
    make_engine: MakeEngine,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Interrupted(FakeEngine):
        def run_step(self, meanwhile: Any = None) -> StepResult:
            raise KeyboardInterrupt

    write_rows([{"input_ids": [1]}])
    monkeypatch.setattr(
        vllm_compat.engine, "open_engine", lambda _, **o: make_engine(Interrupted, layer_ids=o["layer_ids"])
    )
    assert main(arguments()) == 130
    err = capfd.readouterr().err
    assert "stopped by KeyboardInterrupt: 0 of 1 samples" in err
    assert err.endswith("error: interrupted\n")


def test_an_estimate(
    arguments: Arguments, engines: list[dict[str, Any]], write_rows: WriteRows, capfd: pytest.CaptureFixture[str]
) -> None:
    """All that is checked, and what it will take; nothing is extracted."""
    write_rows([{"input_ids": [5, 6, 7]}, {"input_ids": [8]}])
    assert main(arguments("--estimate", "--tokens-per-second", "0.5")) == 0
    assert "samples: 2, 4 tokens" in capfd.readouterr().out
    assert main(arguments("--estimate", "--json", "--tokens_per_second", "0.5")) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["tokens"], found["hours"]["value"] * 3600) == (4, 8)
    write_rows([{"input_ids": [5, -6]}])
    assert main(arguments("--estimate")) == 4
    assert not engines


def test_an_estimate_of_what_does_not_fit(
    arguments: Arguments, write_rows: WriteRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows([{"input_ids": [5, 6, 7]}])
    found = os.statvfs(tmp_path)
    none_free = os.statvfs_result([*found[:4], 0, *found[5:]])
    monkeypatch.setattr("vllm_compat.extract.estimate.os.statvfs", lambda _: none_free)
    assert main(arguments("--estimate")) == 2


def test_it_rehearses_before_the_load(
    arguments: Arguments, engines: list[dict[str, Any]], write_rows: WriteRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, when samples are owed, and not when it is told not to; what fails there is not loaded."""
    rehearsed: list[ExtractConfig] = []

    def rehearse(config: ExtractConfig, plan: Plan) -> None:
        rehearsed.append(config)
        assert plan.layer_ids == (2, 4, 5, 7)
        if len(rehearsed) == 1:
            raise RehearsalError("as it would be later", exit_code=3)

    monkeypatch.setattr("vllm_compat.extract.run.rehearse", rehearse)
    write_rows([{"input_ids": [5, 6, 7]}])
    wanted = [a for a in arguments() if a != "--no-rehearsal"]
    assert main(wanted) == 3
    assert not engines
    assert main(wanted) == 0
    assert len(engines) == 1
    assert main(wanted) == 0
    assert len(rehearsed) == 2, "nothing was owed any more"


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import runpy, sys\n"
        "sys.argv = ['extract', '--help']\n"
        "try:\n    runpy.run_module('vllm_compat.extract', run_name='__main__')\n"
        "except SystemExit as error:\n    assert error.code == 0\n"
        "heavy = {'torch', 'vllm', 'tqdm', 'safetensors', 'numpy', 'transformers'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "--layer-ids" in found.stdout


def test_a_worker_that_imports_the_main_module_runs_nothing() -> None:
    code = "import runpy; runpy.run_module('vllm_compat.extract.__main__', run_name='__mp_main__')"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout == b""
