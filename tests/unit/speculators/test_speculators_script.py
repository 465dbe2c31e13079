"""A script run with our generator in the place of speculators': in its process and those it spawns, nowhere else."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_compat
from vllm_compat.speculators.replaced import REPLACED, generator_replaced
from vllm_compat.speculators.script import run_script

PACKAGE = Path(vllm_compat.__file__).parents[1]
LOUD = 'raise ImportError("speculators\' own generator was imported")\n'


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A speculators laid out as 0.3.0 to 0.4.0.1 are, whose own generator cannot be imported."""
    folder = tmp_path / "installed" / "speculators" / "data_generation"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("")
    (folder / "__init__.py").write_text(f"from {REPLACED} import VllmHiddenStatesGenerator\n")
    (folder / "vllm_hidden_states_generator.py").write_text(LOUD)
    (folder / "preprocessing.py").write_text("def load(): return 'their own'\n")
    monkeypatch.syspath_prepend(str(folder.parents[1]))
    return folder.parents[1]


def run(script: Path, *arguments: str, installed: Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The script in an interpreter of its own, by the lines of the command that matter, and no vLLM."""
    code = "import sys; from vllm_compat.speculators.script import run_script; run_script(sys.argv[1], sys.argv[2:])"
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(PACKAGE), str(installed)])}
    command = [sys.executable, "-c", code, str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=cwd, timeout=120, check=False)


@pytest.mark.parametrize(
    "line",
    [
        "from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator",
        "from speculators.data_generation import VllmHiddenStatesGenerator",
        "import speculators.data_generation as d; VllmHiddenStatesGenerator = d.VllmHiddenStatesGenerator",
        f"import {REPLACED} as g; VllmHiddenStatesGenerator = g.VllmHiddenStatesGenerator",
    ],
)
def test_every_way_to_import_it_gives_ours(line: str, installed: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"{line}\nfrom speculators.data_generation.preprocessing import load\n"
        "print(VllmHiddenStatesGenerator.__module__, load())\n"
    )
    done = run(script, installed=installed)
    assert done.stdout.split("\n")[0] == "vllm_compat.speculators.generator their own", done.stderr


def test_a_script_finds_itself_as_python_would_run_it(installed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "beside.py").write_text("here = True\n")
    script = folder / "script.py"
    script.write_text(
        "import json, os, sys, beside\n"
        "class Kept: pass\n"
        "main = sys.modules['__main__']\n"
        "print(json.dumps([__name__, __file__, sys.argv, sys.path[0], Kept.__module__, main.Kept is Kept,"
        " sorted(k for k in globals() if not k.startswith('__'))]))\n"
    )
    done = run(Path("scripts/script.py"), "--a", "-b", "c d", installed=installed, cwd=tmp_path)
    name, file, argv, first, module, same, names = json.loads(done.stdout)
    assert (name, module, same) == ("__main__", "__main__", True)
    assert file == argv[0] == str(script)
    assert argv[1:] == ["--a", "-b", "c d"]
    assert first == str(folder)
    assert names == ["Kept", "beside", "json", "main", "os", "sys"]


def test_a_process_that_the_script_spawns_gets_ours_too(installed: Path, tmp_path: Path) -> None:
    """vLLM's workers are such: importing the script again there ended in speculators' own ImportError."""
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, sys\n"
        "from speculators.data_generation import VllmHiddenStatesGenerator\n"
        "def which(n):\n    return n, __name__, VllmHiddenStatesGenerator.__module__\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n        print(pool.map(which, [1, 2]))\n"
    )
    done = run(script, installed=installed)
    ours = "vllm_compat.speculators.generator"
    assert done.stdout == f"{[(1, '__mp_main__', ours), (2, '__mp_main__', ours)]}\n", done.stderr


@pytest.mark.parametrize(("end", "code"), [("sys.exit(7)", 7), ("raise ValueError('theirs')", 1), ("", 0)])
def test_the_scripts_exit_code_is_the_commands(end: str, code: int, installed: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import sys\n{end}\n")
    done = run(script, installed=installed)
    assert done.returncode == code
    assert ("theirs" in done.stderr) == ("theirs" in end)


def test_afterwards_the_interpreter_is_as_it_was(installed: Path, tmp_path: Path) -> None:
    before = (list(sys.meta_path), list(sys.path), list(sys.argv), sys.modules["__main__"])
    script = tmp_path / "script.py"
    script.write_text("from speculators.data_generation import VllmHiddenStatesGenerator\nraise KeyError('end')\n")
    with pytest.raises(KeyError, match="end"):
        run_script(str(script), [])
    assert (list(sys.meta_path), list(sys.path), list(sys.argv), sys.modules["__main__"]) == before
    assert not [name for name in sys.modules if name.partition(".")[0] == "speculators"]
    with pytest.raises(ImportError, match="own generator was imported"):
        importlib.import_module("speculators.data_generation")
    assert (installed / "speculators/data_generation/vllm_hidden_states_generator.py").read_text() == LOUD


def test_too_late_is_said(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, REPLACED, sys)
    with pytest.raises(RuntimeError, match="imported already"), generator_replaced():
        pass


@pytest.mark.parametrize("content", [None, "def f(:\n", "\0"], ids=["missing", "no Python", "a null"])
def test_what_is_no_script_is_refused(content: str | None, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    if content is not None:
        script.write_text(content)
    with pytest.raises(vllm_compat.UsageError, match=r"script\.py cannot be run"):
        run_script(str(script), [])
