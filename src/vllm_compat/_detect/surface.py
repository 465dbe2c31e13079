"""What vLLM's source offers, read by ``ast``: its classes, functions, parameters and attributes.

A symbol is written ``module:Class.member``, such as ``vllm.v1.request:Request.__init__``. Imported names and base
classes are followed, inside vLLM only.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

__all__ = ["Found", "Surface", "Symbols"]

_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
_HOPS = 12  # longest chain of re-exports and bases followed; vLLM's longest is 4


@dataclass(frozen=True, slots=True)
class Found:
    """A symbol that exists. ``parameters`` and ``required`` are those of a function (without ``self``), else empty.

    A function that takes ``**kwargs`` lists ``"**"`` among its parameters.
    """

    symbol: str
    parameters: tuple[str, ...] = ()
    required: frozenset[str] = frozenset()


class Symbols(Protocol):
    """Whatever can say which symbols a vLLM has: its source, or a record of it."""

    def find(self, symbol: str) -> Found | None:
        """The symbol, or None when this vLLM does not have it."""
        ...


class Surface:
    """The source of one vLLM, parsed as far as it is asked for."""

    def __init__(self, package: Path) -> None:
        self._package = package
        self._trees: dict[str, ast.Module | None] = {}

    def find(self, symbol: str) -> Found | None:
        """The symbol, or None when this vLLM does not have it."""
        module, _, path = symbol.partition(":")
        if not path:
            return Found(symbol) if self._tree(module) is not None else None
        name, _, member = path.partition(".")
        where = self._definition(module, name)
        if where is None:
            return None
        home, node = where
        if not member:
            return _describe(symbol, node)
        owner = self._member(home, node, member)
        return None if owner is None else _describe(symbol, owner)

    def _tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            self._trees[module] = self._parse(module)
        return self._trees[module]

    def _parse(self, module: str) -> ast.Module | None:
        base = self._package.joinpath(*module.split(".")[1:])
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # as errors, they would make a file unreadable
                    return ast.parse(path.read_bytes())
            except (OSError, SyntaxError, ValueError):
                continue
        return None

    def _definition(self, module: str, name: str, hops: int = _HOPS) -> tuple[str, ast.AST] | None:
        """Module and node that define ``name``, through any re-exports."""
        tree = self._tree(module)
        if tree is None or hops == 0:
            return None
        for node in _statements(tree.body):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
                return module, node
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and name in _targets(node):
                return module, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        source = self._absolute(module, node)
                        if source is not None:
                            return self._definition(source, alias.name, hops - 1)
        return None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str | None:
        if not node.level:
            return node.module if (node.module or "").split(".")[0] == "vllm" else None
        parts = module.split(".")
        is_package = (self._package.joinpath(*parts[1:]) / "__init__.py").exists()
        parts = parts[: len(parts) - node.level + is_package]
        return ".".join([*parts, node.module] if node.module else parts)

    def _member(self, module: str, node: ast.AST, member: str, hops: int = _HOPS) -> ast.AST | None:
        if not isinstance(node, ast.ClassDef) or hops == 0:
            return None
        for child in _statements(node.body):
            if (
                isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
                and child.name == member
                and not any(ast.unparse(d).rpartition(".")[2] == "overload" for d in child.decorator_list)
            ):
                return child
            if isinstance(child, (ast.Assign, ast.AnnAssign)) and member in _targets(child):
                return child
        for base in node.bases:
            if isinstance(base, ast.Subscript):
                base = base.value
            if isinstance(base, ast.Name) and (where := self._definition(module, base.id)):
                found = self._member(*where, member, hops - 1)
                if found is not None:
                    return found
        return next((a for a in _set_on_self(node) if a.attr == member), None)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a body, those under ``if`` and ``try`` included."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            yield from _statements(node.body)
            yield from _statements(node.orelse)
        if isinstance(node, ast.Try):
            for handler in node.handlers:
                yield from _statements(handler.body)


def _targets(node: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {t.id for t in targets if isinstance(t, ast.Name)}


def _set_on_self(node: ast.ClassDef) -> Iterator[ast.Attribute]:
    """Attributes that the methods of a class assign on ``self``."""
    for child in ast.walk(node):
        targets = (
            child.targets
            if isinstance(child, ast.Assign)
            else [child.target]
            if isinstance(child, ast.AnnAssign)
            else ()
        )
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple) else (target,):
                if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self":
                    yield part


def _describe(symbol: str, node: ast.AST) -> Found:
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return Found(symbol)
    positional = [*node.args.posonlyargs, *node.args.args]
    with_default = {a.arg for a in positional[len(positional) - len(node.args.defaults) :]}
    with_default |= {a.arg for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if d is not None}
    names = [a.arg for a in [*positional, *node.args.kwonlyargs] if a.arg not in ("self", "cls")]
    required = frozenset(n for n in names if n not in with_default)
    return Found(symbol, (*names, *(["**"] if node.args.kwarg else [])), required)
