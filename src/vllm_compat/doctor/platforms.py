"""The platform that a vLLM was built for, and what of a module is left on it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from vllm_compat.detection import Detection

__all__ = ["built_for", "statements_on"]

_ASKS = "current_platform."


def built_for(found: Detection) -> str:
    """``cpu`` or ``rocm``, where the distribution's name or the version's local part says so; else ``cuda``."""
    local = found.version.local if found.version else None
    named = f"{found.distribution} {local}"
    return next((p for p in ("cpu", "rocm") if p in named), "cuda")


def statements_on(platform: str, body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """A module's statements, of each ``if`` about ``current_platform`` the branch that the platform takes.

    ``if TYPE_CHECKING`` is such an ``if``: its ``else`` is the truth, and what has none is imported later, by name.
    """
    for node in body:
        taken = _holds(platform, node.test, bool(node.orelse)) if isinstance(node, ast.If) else None
        if isinstance(node, ast.If) and taken is not None:
            yield from statements_on(platform, node.body if taken else node.orelse)
        else:
            yield node


def _holds(platform: str, test: ast.expr, has_else: bool) -> bool | None:
    """Whether a test is true on the platform; None for a test of something else."""
    if isinstance(test, ast.BoolOp):
        known = [v for v in (_holds(platform, part, has_else) for part in test.values) if v is not None]
        return (any(known) if isinstance(test.op, ast.Or) else all(known)) if known else None
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _holds(platform, test.operand, has_else)
        return None if inner is None else not inner
    text = ast.unparse(test)
    if text == "TYPE_CHECKING":
        return not has_else
    return platform in text if _ASKS in text else None
