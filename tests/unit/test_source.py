"""Rules for our own source: no code chosen by a version, nothing heavy imported on sight, nothing unpickled."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import vllm_compat

SOURCE = Path(inspect.getfile(vllm_compat)).parent
FILES = sorted(SOURCE.glob("**/*.py"))
UNPICKLERS = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
VERSION_WORDS = {"__version__", "__version_tuple__", "version_tuple", "version_text", "base_version", "VersionInfo"}


def version_comparisons(tree: ast.Module) -> Iterator[str]:
    """Comparisons, ``in`` included, with a ``Version(...)``, a ``__version__`` or the like on either side."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and not all(isinstance(o, (ast.Is, ast.IsNot)) for o in node.ops):
            for part in ast.walk(node):
                name = _name(part.func) if isinstance(part, ast.Call) else _name(part)
                if name in VERSION_WORDS or (isinstance(part, ast.Call) and name in ("Version", "parse_version")):
                    yield ast.unparse(node)
                    break
        if isinstance(node, ast.Attribute) and node.attr == "startswith" and _name(node.value) in VERSION_WORDS:
            yield ast.unparse(node)


def heavy_imports(tree: ast.Module) -> Iterator[str]:
    """Imports of torch or vLLM that run as soon as the module is imported."""
    for node in _run_on_import(tree.body):
        modules = (
            [a.name for a in node.names] if isinstance(node, ast.Import)
            else [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level
            else []
        )  # fmt: skip
        yield from (m for m in modules if m.split(".")[0] in ("torch", "vllm"))


def unsafe_calls(tree: ast.Module) -> Iterator[str]:
    """Whatever runs code that it is given as data. ``torch.load(..., weights_only=True)`` does not."""
    harmless = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call) and _weights_only(node)]
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (n for n in names if n.split(".")[0] in UNPICKLERS)
        loads = (
            isinstance(node, ast.Attribute) and node.attr == "load" and _name(node.value) in ("torch", "np", "numpy")
        )
        if loads and node not in harmless:
            yield ast.unparse(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
            yield ast.unparse(node)


def _weights_only(call: ast.Call) -> bool:
    given = {k.arg: k.value for k in call.keywords}
    wanted = given.get("weights_only")
    return ast.unparse(call.func) == "torch.load" and isinstance(wanted, ast.Constant) and wanted.value is True


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _run_on_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from _run_on_import(node.orelse)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for field in ("body", "orelse", "finalbody", "handlers"):
                for child in getattr(node, field, ()):
                    yield from _run_on_import([child] if isinstance(child, ast.stmt) else child.body)


Rule = Callable[[ast.Module], Iterator[str]]


@pytest.mark.parametrize(
    ("rule", "excepted"),
    [
        (version_comparisons, {"_detect/matrix.py"}),
        (heavy_imports, set()),
        (unsafe_calls, {"speculators/script.py", "speculators/spawned.py"}),  # a script that its user names, to be run
    ],
)
def test_our_source_keeps_the_rule(rule: Rule, excepted: set[str]) -> None:
    assert len(FILES) > 20
    found = {str(f.relative_to(SOURCE)): list(rule(ast.parse(f.read_text(encoding="utf-8")))) for f in FILES}
    assert {name: lines for name, lines in found.items() if lines and name not in excepted} == {}
    assert all(found[name] for name in excepted), "an exception that is needed no more"


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (version_comparisons, "if Version(vllm.__version__) >= Version('0.17'): ..."),
        (version_comparisons, "x = packaging.version.Version(a) == b"),
        (version_comparisons, "while '0.1' < vllm.__version__ < '0.2': ..."),
        (version_comparisons, "y = vllm.version_tuple[:2] > (0, 11)"),
        (version_comparisons, "y = installed.version_text in ('0.11.0', '0.12.0')"),
        (version_comparisons, "y = vllm.__version__.startswith('0.11')"),
        (heavy_imports, "import torch"),
        (heavy_imports, "import vllm.config as c"),
        (heavy_imports, "from vllm.v1.request import Request"),
        (heavy_imports, "try:\n    import os\nexcept ImportError:\n    import torch"),
        (heavy_imports, "try: ...\nfinally:\n    import torch"),
        (heavy_imports, "class A:\n    from torch import nn"),
        (heavy_imports, "if x: ...\nelif y: ...\nelse:\n    import torch.nn"),
        (heavy_imports, "if TYPE_CHECKING: ...\nelse:\n    import torch"),
        (unsafe_calls, "import pickle"),
        (unsafe_calls, "def f():\n    from cloudpickle import loads"),
        (unsafe_calls, "torch.load(path)"),
        (unsafe_calls, "f = np.load"),
        (unsafe_calls, "torch.load(path, weights_only=False)"),
        (unsafe_calls, "torch.load(path, weights_only=safe)"),
        (unsafe_calls, "np.load(path, weights_only=True)"),
        (unsafe_calls, "f = torch.load\ntorch.load(path, weights_only=True)"),
        (unsafe_calls, "eval('1')"),
        (unsafe_calls, "exec(text)"),
    ],
)
def test_a_breach_of_the_rule_is_noticed(rule: Rule, text: str) -> None:
    assert list(rule(ast.parse(text)))


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (version_comparisons, "if self.version is None: ...\nx = Version(text)\nif sys.version_info >= (3, 11): ..."),
        (heavy_imports, "def f():\n    import torch\nif TYPE_CHECKING:\n    import torch\nfrom vllm_compat import x"),
        (heavy_imports, "from . import vllm\nfrom .vllm import x"),
        (unsafe_calls, "model.eval()\njson.load(f)\nload(x)"),
        (unsafe_calls, "torch.load(path, mmap=True, weights_only=True)"),
    ],
)
def test_what_only_looks_like_a_breach_is_allowed(rule: Rule, text: str) -> None:
    assert list(rule(ast.parse(text))) == []
