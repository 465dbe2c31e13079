"""``python -m vllm_compat.speculators run``: what it says first, and its exit codes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.doctor.tree import write_tree
from tests.unit.vllm_tree import importing

from vllm_compat.__main__ import main as all_commands
from vllm_compat.speculators import __main__ as command
from vllm_compat.speculators.__main__ import main


@pytest.fixture
def vllm(tmp_path: Path) -> Iterator[None]:
    """A vLLM that must not be imported."""
    write_tree(tmp_path / "site", version="0.16.0")
    with importing(tmp_path / "site"):
        yield


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text("import sys\nprint('ran with', sys.argv[1:])\nsys.exit(int(sys.argv[-1]))\n")
    return path


@pytest.mark.usefixtures("vllm")
def test_what_would_have_failed_is_said_before_the_script_runs(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "version", lambda _: "0.3.0")
    with pytest.raises(SystemExit) as end:
        main(["run", str(script), "--layer-ids", "2", "7"])
    assert end.value.code == 7
    out, err = capsys.readouterr()
    assert out == "ran with ['--layer-ids', '2', '7']\n"
    first, *reasons = err.splitlines()
    assert first == (
        "vllm_compat: for this run the generator of speculators 0.3.0 is ours. By itself it would fail here:"
    )
    assert "  - it builds the scheduler without block_size: TypeError" in reasons
    assert len(reasons) >= 8


@pytest.mark.usefixtures("vllm")
def test_the_scripts_options_are_its_own_even_help(script: Path) -> None:
    script.write_text("import sys\nassert sys.argv[1:] == ['--help', '--', '-x'], sys.argv\n")
    assert main(["run", str(script), "--help", "--", "-x"]) == 0
    assert all_commands(["speculators", "run", str(script), "--help", "--", "-x"]) == 0


@pytest.mark.usefixtures("vllm")
def test_a_script_that_is_not_there_is_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(tmp_path / "none.py")]) == 2
    assert "none.py cannot be run" in capsys.readouterr().err


def test_without_a_vllm_nothing_is_run(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vllm_compat.detection.find_installed", lambda *_: None)
    assert main(["run", str(script), "0"]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert "no vLLM is installed" in err


@pytest.mark.parametrize("argv", [[], ["run"], ["walk", "script.py"]])
def test_half_a_command_is_usage(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 2
