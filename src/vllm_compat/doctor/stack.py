"""Find a model's decoder layers in source, by the rule that ``_capture/layers.py`` applies to the live model."""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vllm_compat.doctor.source import Class, Source, called_name, calls, self_assignments

__all__ = ["Layer", "Stack", "find_layer", "find_stacks"]

_LISTS = ("make_layers", "ModuleList")
_EMBEDDING = "VocabParallelEmbedding"
_INNER_MODEL = "init_vllm_registered_model"


@dataclass(frozen=True, slots=True)
class Stack:
    """A list of layers.

    Attributes:
        cls: the class of the module that has it.
        name: its attribute there.
        place: file and line of the assignment.
        beside_embedding: the vocabulary's embedding is an attribute of the same module.
        owner: the class of the lineage that makes the list.
        made: the call that makes it.
    """

    cls: Class
    name: str
    place: str
    beside_embedding: bool
    owner: Class
    made: ast.Call


@dataclass(frozen=True, slots=True)
class Layer:
    """A decoder layer.

    Attributes:
        name: its class.
        returns: what its forward returns, as source.
        parts: in how many parts; None where the source does not tell.
        place: file and line of that.
    """

    name: str
    returns: str
    parts: int | None
    place: str


def find_stacks(source: Source, model: Class, inner: Sequence[str] = ()) -> list[Stack]:
    """The list beside the vocabulary's embedding, alone; failing that, every list of a model.

    Args:
        source: of the vLLM.
        model: the class that serves the architecture.
        inner: architectures of the model's own language model, as its configuration names them.
    """
    waiting, seen, others = deque([model]), set[Class](), list[Stack]()
    while waiting:
        cls = waiting.popleft()
        if cls in seen:
            continue
        seen.add(cls)
        for stack in _lists(source, cls):
            if stack.beside_embedding:
                return [stack]
            others.append(stack)
        waiting.extend(_inner_models(source, cls, inner))
        waiting.extend(source.model_classes(cls))
    return others


def find_layer(source: Source, stack: Stack) -> Layer | None:
    """The class of a stack's layers; None where the source does not name it."""
    for call in ast.walk(stack.made):
        if isinstance(call, ast.Call) and call is not stack.made:
            cls = source.find_class(stack.owner.home, called_name(call)) or _passed(source, stack, called_name(call))
            forward = source.method(cls, "forward") if cls else None
            if cls and forward:
                return _describe(source, cls, *forward)
    return None


def _describe(source: Source, cls: Class, owner: Class, forward: ast.FunctionDef) -> Layer:
    returned = list(_returned(forward))
    # Only a tuple that is written out has a number of parts; a name may be one, too.
    parts = {len(r.elts) if isinstance(r, ast.Tuple) else None for r in returned}
    last = returned[-1] if returned else forward
    return Layer(
        cls.name,
        ast.unparse(last)[1:-1] if isinstance(last, ast.Tuple) else ast.unparse(last) if returned else "nothing",
        parts.pop() if len(parts) == 1 else None,
        source.place(owner.home, last),
    )


def _lists(source: Source, cls: Class) -> Iterator[Stack]:
    made = [(owner, name, call) for owner in source.lineage(cls) for name, call in self_assignments(owner.node)]
    beside = any(called_name(call) == _EMBEDDING for _, _, call in made)
    for owner, name, call in made:
        if called_name(call) in _LISTS:
            yield Stack(cls, name, source.place(owner.home, call), beside, owner, call)


def _inner_models(source: Source, cls: Class, inner: Sequence[str]) -> Iterator[Class]:
    """The language models that a wrapper takes from the registry: those it names, or those its configuration does."""
    for owner in source.lineage(cls):
        for call in calls(owner.node, _INNER_MODEL):
            given = next((k.value for k in call.keywords if k.arg == "architectures"), None)
            written = [n.value for n in ast.walk(given) if isinstance(n, ast.Constant)] if given else []
            for architecture in written or inner:
                row = source.registry.get(str(architecture))
                known = source.find_class(row.module, row.name) if row else None
                if known:
                    yield known


def _passed(source: Source, stack: Stack, parameter: str) -> Class | None:
    """The class that a constructor is given as ``parameter``: by a class derived from its own, or by default."""
    for cls in source.lineage(stack.cls):
        for call in ast.walk(cls.node):
            for keyword in call.keywords if isinstance(call, ast.Call) else ():
                known = source.named(cls, keyword.value) if keyword.arg == parameter else None
                if known:
                    return known
    constructor = source.method(stack.owner, "__init__")
    if constructor is None:
        return None
    arguments = constructor[1].args
    pairs = zip(reversed([*arguments.posonlyargs, *arguments.args]), reversed(arguments.defaults), strict=False)
    defaults = dict(pairs) | dict(zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True))
    for argument, default in defaults.items():
        if argument.arg == parameter and default:
            return source.named(stack.owner, default)
    return None


def _returned(node: ast.AST) -> Iterator[ast.expr]:
    """What a function returns, those of functions inside it left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Return) and child.value is not None:
            yield child.value
        elif not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from _returned(child)
