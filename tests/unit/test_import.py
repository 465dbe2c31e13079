"""What importing the package costs, and what it shows."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

import vllm_compat
from vllm_compat import engine, errors, testing, types

HEAVY = ("torch", "vllm", "numpy", "transformers")
REPORT = f"import sys; print(sorted(set(sys.modules) & set({HEAVY!r})))"
SOURCE = Path(inspect.getfile(vllm_compat)).parent


def loaded_by(code: str, tmp_path: Path) -> str:
    """Which heavy packages a fresh interpreter has loaded after ``code``; each of them can be imported there."""
    for name in HEAVY:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("", encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(SOURCE.parent)])}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{code}\n{REPORT}"],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "code",
    [
        "import vllm_compat",
        "from vllm_compat import *",
        "import vllm_compat; assert vllm_compat.detect().installed is not None",
        "import vllm_compat; vllm_compat.detect().as_dict()",
        "import vllm_compat.testing; vllm_compat.testing.FakeEngine()",
        "import vllm_compat._engine.vllm_engine",
        "import vllm_compat._engine.build",
        "import vllm_compat._capture.tap",
        "import vllm_compat.speculators",
    ],
)
def test_loads_neither_torch_nor_vllm_nor_numpy(code: str, tmp_path: Path) -> None:
    assert loaded_by(code, tmp_path) == "[]"


@pytest.mark.parametrize(
    "module", ["vllm_compat", "vllm_compat.extract", "vllm_compat.identify", "vllm_compat.speculators"]
)
def test_the_help_of_a_command_loads_neither_torch_nor_vllm_nor_numpy(module: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(f"{module}.__main__") is None:
        pytest.skip(f"{module} has no command line yet")
    code = f"""
import runpy, sys
sys.argv = ["prog", "--help"]
try:
    runpy.run_module({module!r}, run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
"""
    assert loaded_by(code, tmp_path) == "[]"


def test_the_list_of_public_names_is_what_resolves() -> None:
    assert all(getattr(vllm_compat, name) is not None for name in vllm_compat.__all__)
    assert sorted(vllm_compat.__all__) == vllm_compat.__all__ == dir(vllm_compat)
    assert {*vllm_compat._HOME, "__version__"} == set(vllm_compat.__all__)


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8"))
    block = next(n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    seen = {
        alias.name: (node.module or "").removeprefix("vllm_compat.")
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == vllm_compat._HOME


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'vllm_compat' has no attribute 'Enginee'"):
        vllm_compat.Enginee  # noqa: B018


def public_objects() -> list[tuple[str, object]]:
    modules: list[ModuleType] = [vllm_compat, engine, errors, testing, types]
    named = [(f"{m.__name__}.{n}", getattr(m, n)) for m in modules for n in m.__all__]
    classes = [(name, value) for name, value in named if inspect.isclass(value)]
    return [(name, value) for name, value in named if inspect.isclass(value) or inspect.isfunction(value)] + [
        (f"{name}.{member}", value)
        for name, kind in classes
        for member, value in vars(kind).items()
        if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property))
    ]


def test_every_public_name_is_documented() -> None:
    def documented(name: str, value: object) -> bool:
        text = value.__doc__ if inspect.isclass(value) else documentation(name, value)
        # dataclass() makes a docstring of the signature where there is none.
        return bool(text) and not (text or "").startswith(f"{name.rpartition('.')[2]}(")

    def documentation(name: str, value: object) -> str | None:
        member = name.rpartition(".")[2]
        return inspect.getdoc(value) or inspect.getdoc(getattr(engine.Engine, member, None))

    undocumented = [name for name, value in public_objects() if not documented(name, value)]
    assert undocumented == []


def test_every_attribute_of_an_engine_is_documented() -> None:
    tree = ast.parse((SOURCE / "engine.py").read_text(encoding="utf-8"))
    body = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Engine").body
    for here, following in pairwise(body):
        if isinstance(here, ast.AnnAssign):
            assert isinstance(following, ast.Expr), ast.unparse(here)
            assert isinstance(following.value, ast.Constant), ast.unparse(here)
