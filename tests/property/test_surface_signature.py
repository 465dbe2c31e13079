"""Whatever a function's parameters, reading its source finds the ones that Python itself sees."""

from __future__ import annotations

import inspect
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_compat._detect.surface import Found, Surface

NAMES = st.lists(st.sampled_from([f"{a}{b}" for a in "abcxyz" for b in ("", "_id", "_ids")]), unique=True, max_size=9)
ANNOTATIONS = st.sampled_from(["", ": int", ": 'str | None'", ": dict[str, list[int]]"])
DEFAULTS = st.sampled_from(["0", "None", "()", "{'k': [1, 2]}", "lambda x, y=1: x", "-1", "'a, b=1'"])


@st.composite
def signatures(draw: st.DrawFn) -> str:
    """A parameter list: positional-only, ordinary, ``*args``, keyword-only and ``**kwargs`` in any mixture."""
    names = draw(NAMES)
    first = draw(st.integers(0, len(names)))
    second = draw(st.integers(first, len(names)))
    defaults_from = draw(st.integers(0, second))

    def one(name: str, has_default: bool) -> str:
        annotation = draw(ANNOTATIONS)
        return f"{name}{annotation} = {draw(DEFAULTS)}" if has_default else f"{name}{annotation}"

    parts = [one(name, n >= defaults_from) for n, name in enumerate(names[:second])]
    if first:
        parts.insert(first, "/")
    if draw(st.booleans()):
        parts.append(one("*args", False))
    elif second < len(names):
        parts.append("*")
    parts += [one(name, draw(st.booleans())) for name in names[second:]]
    if draw(st.booleans()):
        parts.append("**kwargs")
    return ", ".join(parts)


def expected(symbol: str, function: Any) -> Found:
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_POSITIONAL]
    return Found(
        symbol,
        tuple("**" if p.kind is p.VAR_KEYWORD else p.name for p in parameters),
        frozenset(p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD),
    )


def surface(files: dict[str, str], home: str) -> Surface:
    package = Path(home) / "vllm"
    package.mkdir()
    for name, text in files.items():
        (package / name).write_text(text, encoding="utf-8")
    return Surface(package)


@given(signature=signatures(), prefix=st.sampled_from(["", "async "]))
@settings(max_examples=150, deadline=None)
def test_parameters_are_those_that_inspect_sees(signature: str, prefix: str) -> None:
    method = f"self, {signature}" if signature else "self"
    text = f"{prefix}def f({signature}): ...\n\nclass C:\n    {prefix}def m({method}): ...\n"
    scope: dict[str, Any] = {}
    exec(text, scope)
    with tempfile.TemporaryDirectory() as home:
        there = surface({"m.py": text}, home)
        assert there.find("vllm.m:f") == expected("vllm.m:f", scope["f"])
        assert there.find("vllm.m:C.m") == expected("vllm.m:C.m", scope["C"]().m)


@given(styles=st.lists(st.sampled_from(["absolute", "relative", "renamed", "guarded", "class"]), max_size=10))
@settings(max_examples=50, deadline=None)
def test_a_symbol_is_found_through_any_chain_of_imports_and_bases(styles: list[str]) -> None:
    files = {"m0.py": "class X0:\n    def f(self, a, b=1): ...\n"}
    for n, style in enumerate(styles):
        here, before = f"X{n + 1}", f"X{n}"
        files[f"m{n + 1}.py"] = {
            "absolute": f"from vllm.m{n} import {before} as {here}\n",
            "relative": f"from .m{n} import {before} as {here}\n",
            "renamed": f"from .m{n} import {before} as _hidden, {before} as {here}\n",
            "guarded": f"try:\n    from vllm.m{n} import {before} as {here}\nexcept ImportError:\n    {here} = None\n",
            "class": f"from vllm.m{n} import {before}\nclass {here}({before}): ...\n",
        }[style]
    symbol = f"vllm.m{len(styles)}:X{len(styles)}.f"
    with tempfile.TemporaryDirectory() as home:
        assert surface(files, home).find(symbol) == Found(symbol, ("a", "b"), frozenset({"a"}))
