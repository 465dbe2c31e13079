"""vLLM's models as source: the registry, classes with their bases, and the place of each."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from vllm_compat._detect.surface import Surface
from vllm_compat.doctor.platforms import statements_on

__all__ = ["Class", "Registered", "Source", "called_name", "calls", "self_assignments"]

_MODELS = "vllm.model_executor.models"
_NOT_GENERATING = (  # tables of the registry; one that is new is taken to generate until the load says otherwise
    *("_EMBEDDING_MODELS", "_CROSS_ENCODER_MODELS", "_LATE_INTERACTION_MODELS", "_REWARD_MODELS"),
    *("_TOKEN_CLASSIFICATION_MODELS", "_SEQUENCE_CLASSIFICATION_MODELS", "_SPECULATIVE_DECODING_MODELS"),
)


@dataclass(frozen=True, slots=True)
class Class:
    """A class of vLLM's.

    Attributes:
        home: the module that defines it.
        name: its name there.
        node: its source.
    """

    home: str
    name: str
    node: ast.ClassDef = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Registered:
    """A row of the model registry.

    Attributes:
        module: where the class is to be imported from.
        name: the class.
        table: the registry's table that has the row.
        place: file and line.
    """

    module: str
    name: str
    table: str
    place: str

    @property
    def generates(self) -> bool:
        """Whether it is a model that samples tokens: embedding models, classifiers and drafts do not."""
        return self.table not in _NOT_GENERATING


class Source(Surface):
    """The source of one vLLM as its platform sees it, with what its models are made of."""

    def __init__(self, package: Path, platform: str) -> None:
        super().__init__(package)
        self._platform = platform
        self._classes: dict[tuple[str, str], Class | None] = {}
        self._lineages: dict[Class, list[Class]] = {}

    def _parse(self, module: str) -> ast.Module | None:
        tree = super()._parse(module)
        if tree is not None:
            tree.body = list(statements_on(self._platform, tree.body))
        return tree

    def place(self, module: str, node: ast.AST) -> str:
        """``file:line`` below the vLLM package."""
        path = Path(*module.split(".")[1:])
        path = path.with_suffix(".py") if (self._package / path).with_suffix(".py").exists() else path / "__init__.py"
        return f"{path.as_posix()}:{getattr(node, 'lineno', 1)}"

    def find_text(self, path: str, text: str) -> str | None:
        """``file:line`` of the first line of a file below the package that has ``text``; None without either."""
        try:
            lines = (self._package / path).read_text(encoding="utf-8").splitlines()
        except OSError:
            return None
        return next((f"{path}:{n}" for n, line in enumerate(lines, 1) if text in line), None)

    def assignments(self, module: str, name: str) -> Iterator[ast.Assign]:
        """Every ``name = ...`` in a module, inside functions too."""
        tree = self._tree(module)
        for node in ast.walk(tree) if tree else ():
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
                yield node

    def find_class(self, module: str, name: str) -> Class | None:
        """The class that ``module`` knows as ``name``, through any imports inside vLLM."""
        key = module, name
        if key not in self._classes:
            found = self._definition(module, name)
            node = found[1] if found else None
            self._classes[key] = Class(found[0], node.name, node) if found and isinstance(node, ast.ClassDef) else None
        return self._classes[key]

    def lineage(self, cls: Class) -> list[Class]:
        """The class and its bases inside vLLM, the class first."""
        if cls not in self._lineages:
            self._lineages[cls] = self._line_up(cls)
        return self._lineages[cls]

    def _line_up(self, cls: Class) -> list[Class]:
        found = [cls]
        for base in cls.node.bases:
            known = self.named(cls, base.value if isinstance(base, ast.Subscript) else base)
            if known:
                # A base of several comes after the last of them, as in Python's own order.
                above = self.lineage(known)
                found = [c for c in found if c not in above] + above
        return found

    def named(self, cls: Class, node: ast.expr) -> Class | None:
        """The class that an expression in ``cls`` is: a name, or ``self.x`` for a class attribute that is one."""
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            set_here = self._member(cls.home, cls.node, node.attr)
            node = getattr(set_here, "value", None) or node
        return self.find_class(cls.home, node.id) if isinstance(node, ast.Name) else None

    def method(self, cls: Class, name: str) -> tuple[Class, ast.FunctionDef] | None:
        """A method and the class of the lineage that has it."""
        for owner in self.lineage(cls):
            for node in owner.node.body:
                if isinstance(node, ast.FunctionDef) and node.name == name:
                    return owner, node
        return None

    def model_classes(self, cls: Class) -> Iterator[Class]:
        """The model classes that a class or one of its bases names, in the order of the source."""
        for owner in self.lineage(cls):
            for node in ast.walk(owner.node):
                known = self.named(owner, node) if isinstance(node, ast.Name) else None
                if known and ".models." in known.home and known.home != f"{_MODELS}.interfaces":
                    yield known

    @cached_property
    def registry(self) -> dict[str, Registered]:
        """Architecture -> what is registered for it."""
        module = f"{_MODELS}.registry"
        rows: dict[str, Registered] = {}
        for table, key, value in self._table_rows(module):
            if isinstance(value, ast.Tuple) and len(value.elts) == 2:
                home, name = (_text(part) for part in value.elts)
                if home and name:
                    home = home if home.startswith("vllm.") else f"{_MODELS}.{home}"
                    rows.setdefault(_text(key), Registered(home, name, table, self.place(module, key)))
        return rows

    def previously_supported(self, architecture: str) -> tuple[str, str] | None:
        """The last release that had an architecture, as the registry itself remembers, and the place that says so."""
        module = f"{_MODELS}.registry"
        for _, key, value in self._table_rows(module):
            if _text(key) == architecture and _text(value):
                return _text(value), self.place(module, key)
        return None

    def _table_rows(self, module: str) -> Iterator[tuple[str, ast.expr, ast.expr]]:
        tree = self._tree(module)
        for node in tree.body if tree else ():
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Dict):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                for key, value in zip(node.value.keys, node.value.values, strict=True):
                    if key is not None and isinstance(target, ast.Name):
                        yield target.id, key, value


def _text(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def called_name(call: ast.Call) -> str:
    """``make_layers`` of ``make_layers(...)``, ``ModuleList`` of ``nn.ModuleList(...)``."""
    return ast.unparse(call.func).rpartition(".")[2]


def calls(node: ast.AST, name: str) -> Iterator[ast.Call]:
    """The calls of ``name`` anywhere below ``node``."""
    return (n for n in ast.walk(node) if isinstance(n, ast.Call) and called_name(n) == name)


def self_assignments(node: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """``name, call`` of each ``self.name = call(...)``, tuples of targets included; the last of those is the name."""
    for child in ast.walk(node):
        if isinstance(child, (ast.Assign, ast.AnnAssign)) and isinstance(child.value, ast.Call):
            for target in child.targets if isinstance(child, ast.Assign) else [child.target]:
                last = target.elts[-1] if isinstance(target, ast.Tuple) else target
                if isinstance(last, ast.Attribute) and ast.unparse(last.value) == "self":
                    yield last.attr, child.value
