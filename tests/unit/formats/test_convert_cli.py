"""The command line of ``convert``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.formats.conftest import MakeRun

from vllm_compat.convert import main
from vllm_compat.formats import FORMATS


def test_all_is_converted(make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = make_run((1, 4, 5, "norm")), tmp_path / "there"
    capsys.readouterr()
    assert main([str(run), str(out), "--format", "specforge", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["samples"] == 12
    assert "12 samples of 12" in printed.err
    assert (out / "rows_0-2000" / "data_11.ckpt").exists()


def test_layers(make_run: MakeRun, tmp_path: Path) -> None:
    run, out = make_run((1, 4, 5, "norm")), tmp_path / "there"
    assert main([str(run), str(out), "--format", "per-layer", "--layer-ids", "norm", "4"]) == 0
    assert json.loads((out / "run.json").read_text())["identity"]["layer_ids"] == ["norm", 4]


def test_refusals(make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = make_run((1, 4, 5, 7)), tmp_path / "there"
    assert main([str(run), str(out), "--format", "specforge"]) == 2
    assert "error: format specforge wants" in capsys.readouterr().err
    (run / "hs_0.safetensors").write_bytes((run / "hs_0.safetensors").read_bytes()[:-1] + b"!")
    assert main([str(run), str(out), "--format", "per-layer"]) == 5
    assert "error: sample 0: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [[], ["a", "b"], ["a", "b", "--format", "x"], ["a", "b", "--format", "eagle", "--layer-ids", "-1"]]
)
def test_options_that_mean_nothing(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2


def test_the_help_names_the_formats_and_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom vllm_compat.convert import main\n"
        "try: main(['--help'])\nexcept SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'vllm', 'numpy', 'transformers', 'datasets', 'safetensors'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in FORMATS)
