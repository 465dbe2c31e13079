"""Reading vLLM's source: where a symbol is defined, what it inherits, which parameters it has."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.unit.vllm_tree import write_vllm

from vllm_compat._detect import need as need_module
from vllm_compat._detect.surface import Found, Surface


def surface(home: Path, files: Mapping[str, str]) -> Surface:
    """A package ``vllm`` of these files, path below it -> text, with an ``__init__.py`` in every folder."""
    for path, text in files.items():
        file = home / "vllm" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text), encoding="utf-8")
    for folder in (home / "vllm").glob("**/"):
        (folder / "__init__.py").touch()
    return Surface(home / "vllm")


@pytest.mark.parametrize(
    ("signature", "parameters", "required"),
    [
        ("self", (), ()),
        ("self, a, b=1", ("a", "b"), ("a",)),
        ("self, a, /, b, *, c, d=1", ("a", "b", "c", "d"), ("a", "b", "c")),
        ("self, a=1, /, b=2, *, c", ("a", "b", "c"), ("c",)),
        ("self, a, *args, b, **kwargs", ("a", "b", "**"), ("a", "b")),
        ("cls, a", ("a",), ("a",)),
        ("self, a: int | None, b: 'str' = '', *, c: int = 0", ("a", "b", "c"), ("a",)),
    ],
)
@pytest.mark.parametrize("word", ["def", "async def"])
def test_the_parameters_of_a_method(
    word: str, signature: str, parameters: tuple[str, ...], required: tuple[str, ...], tmp_path: Path
) -> None:
    found = surface(tmp_path, {"m.py": f"class C:\n    {word} f({signature}): ..."}).find("vllm.m:C.f")
    assert found == Found("vllm.m:C.f", parameters, frozenset(required))


def test_the_parameters_of_a_function(tmp_path: Path) -> None:
    found = surface(tmp_path, {"m.py": "def f(a, b=1): ..."}).find("vllm.m:f")
    assert found == Found("vllm.m:f", ("a", "b"), frozenset({"a"}))


def test_the_parameters_of_an_overloaded_method_are_those_that_a_call_meets(tmp_path: Path) -> None:
    # vLLM's Executor declares execute_model, sample_tokens and collective_rpc like this.
    text = """
        from typing import Literal, overload
        import typing

        class C:
            @overload
            def f(self, a, non_block: Literal[False] = False): ...
            @typing.overload
            def f(self, a, non_block: Literal[True]): ...
            def f(self, a, non_block=False, timeout=None): ...
        """
    found = surface(tmp_path, {"m.py": text}).find("vllm.m:C.f")
    assert found == Found("vllm.m:C.f", ("a", "non_block", "timeout"), frozenset({"a"}))


@pytest.mark.parametrize(
    ("body", "member"),
    [
        ("x: int", "x"),
        ("x: int = 1", "x"),
        ("x = y = 1", "x"),
        ("x = y = 1", "y"),
        ("class Inner: ...\n    x = 1", "x"),
        ("@property\n    def x(self): ...", "x"),
        ("@staticmethod\n    def x(): ...", "x"),
        ("if True:\n        x = 1", "x"),
        ("if True: ...\n    else:\n        def x(self): ...", "x"),
        ("try:\n        x = 1\n    except ImportError: ...", "x"),
        ("try: ...\n    except ImportError:\n        x = 1", "x"),
        ("def f(self):\n        self.x = 1", "x"),
        ("def f(self):\n        self.x: int = 1", "x"),
        ("def f(self):\n        self.x: int", "x"),
        ("def f(self):\n        self.w, self.x = 1, 2", "x"),
        ("def f(self):\n        self.w = self.x = 1", "x"),
        ("def f(self):\n        if self.y:\n            for i in y:\n                self.x = i", "x"),
    ],
)
def test_the_members_of_a_class(body: str, member: str, tmp_path: Path) -> None:
    there = surface(tmp_path, {"m.py": f"class C:\n    {body}"})
    assert there.find(f"vllm.m:C.{member}") == Found(f"vllm.m:C.{member}")
    assert there.find("vllm.m:C.absent") is None


@pytest.mark.parametrize(
    "body", ["x.y = 1", "def f(self):\n        other.x = 1", "def f(self):\n        x = 1", "y = x"]
)
def test_what_only_looks_like_a_member(body: str, tmp_path: Path) -> None:
    assert surface(tmp_path, {"m.py": f"class C:\n    {body}"}).find("vllm.m:C.x") is None


@pytest.mark.parametrize(
    "text",
    [
        "class X: ...",
        "X = 1",
        "X: int",
        "X: int = 1",
        "Y = X = 1",
        "def X(): ...",
        "async def X(): ...",
        "if a:\n    X = 1",
        "if a: ...\nelif b: ...\nelse:\n    class X: ...",
        "try:\n    X = 1\nexcept ImportError: ...",
        "try: ...\nexcept ImportError:\n    X = 1",
        "try: ...\nexcept ImportError: ...\nelse:\n    X = 1",
        "if a:\n    try: ...\n    except ImportError:\n        X = 1",
    ],
)
def test_a_definition_at_the_top_of_a_module_or_under_a_condition(text: str, tmp_path: Path) -> None:
    there = surface(tmp_path, {"m.py": text})
    assert there.find("vllm.m:X") == Found("vllm.m:X")
    assert there.find("vllm.m:Z") is None


@pytest.mark.parametrize("text", ["def f():\n    X = 1", "class C:\n    X = 1", "X.y = 1", "X", "import X"])
def test_what_only_looks_like_a_definition(text: str, tmp_path: Path) -> None:
    assert surface(tmp_path, {"m.py": text}).find("vllm.m:X") is None


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("a/b/here.py", "from vllm.a.home import X"),
        ("a/b/here.py", "from vllm.a.home import Y as W, X"),
        ("a/b/here.py", "from ..home import X"),
        ("a/b/__init__.py", "from ..home import X"),
        ("a/here.py", "from .home import X"),
        ("a/__init__.py", "from .home import X"),
        ("a/b/here.py", "from vllm.a.home import Real as X"),
        ("a/b/here.py", "if TYPE_CHECKING:\n    from vllm.a.home import X"),
        ("a/b/here.py", "try:\n    from vllm.a.home import X\nexcept ImportError:\n    X = None"),
        ("a/b/here.py", "from vllm.a.between import X"),
        ("a/b/here.py", "from vllm.a import X"),
    ],
)
def test_a_name_imported_from_elsewhere_in_vllm_is_followed(place: str, line: str, tmp_path: Path) -> None:
    files = {
        "a/home.py": "class X:\n    def f(self, a): ...\nclass Real(X): ...",
        "a/between.py": "from .home import X as Hidden\nfrom vllm.a.home import X",
        "a/__init__.py": "from vllm.a.between import X",
        place: line,
    }
    module = "vllm." + place.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    assert surface(tmp_path, files).find(f"{module}:X.f") == Found(f"{module}:X.f", ("a",), frozenset({"a"}))


def test_a_name_imported_under_another_is_not_there_under_its_own(tmp_path: Path) -> None:
    there = surface(tmp_path, {"m.py": "from vllm.n import X as Y", "n.py": "class X: ..."})
    assert there.find("vllm.m:Y") is not None
    assert there.find("vllm.m:X") is None


@pytest.mark.parametrize("line", ["from torch import X", "from vllm_other.m import X", "from vllm.m import Y as X"])
def test_a_name_that_is_not_vllm_s_own_is_not_followed(line: str, tmp_path: Path) -> None:
    assert surface(tmp_path, {"here.py": line, "m.py": ""}).find("vllm.here:X") is None


def test_a_fallback_of_vllm_s_own_counts_where_the_first_choice_is_not_vllm_s(tmp_path: Path) -> None:
    text = "try:\n    from fast import X\nexcept ImportError:\n    from vllm.slow import X"
    assert surface(tmp_path, {"m.py": text, "slow.py": "class X: ..."}).find("vllm.m:X") is not None


@pytest.mark.parametrize(
    ("line", "base_class"),
    [
        ("from vllm.base import Base", "Base"),
        ("from .base import Base", "Base"),
        ("from vllm.base import Base as Other", "Other"),
        ("from vllm.base import Base", "Base[int]"),
        ("from vllm.base import Base", "Unknown, Base"),
        ("from vllm.base import Base\nclass Between(Base): ...", "Between"),
        ("from vllm.base import Alias", "Alias"),
    ],
)
def test_members_of_a_base_in_another_module_are_found(line: str, base_class: str, tmp_path: Path) -> None:
    files = {
        "base.py": "class Base:\n    def f(self, a): ...\n    def g(self):\n        self.x = 1\nclass Alias(Base): ...",
        "m.py": f"{line}\nclass C({base_class}): ...",
    }
    there = surface(tmp_path, files)
    assert there.find("vllm.m:C.f") == Found("vllm.m:C.f", ("a",), frozenset({"a"}))
    assert there.find("vllm.m:C.x") == Found("vllm.m:C.x")
    assert there.find("vllm.m:C.absent") is None


def test_a_member_of_the_class_itself_hides_that_of_its_base(tmp_path: Path) -> None:
    text = "class Base:\n    def f(self, old): ...\nclass C(Base):\n    def f(self, new): ..."
    assert surface(tmp_path, {"m.py": text}).find("vllm.m:C.f") == Found("vllm.m:C.f", ("new",), frozenset({"new"}))


def test_a_function_has_no_members(tmp_path: Path) -> None:
    assert surface(tmp_path, {"m.py": "def f():\n    x = 1"}).find("vllm.m:f.x") is None


def test_a_module_by_itself(tmp_path: Path) -> None:
    there = surface(tmp_path, {"a/m.py": ""})
    assert [there.find(m) for m in ("vllm", "vllm.a", "vllm.a.m", "vllm.a.n", "vllm.b")] == [
        Found("vllm"), Found("vllm.a"), Found("vllm.a.m"), None, None,
    ]  # fmt: skip


@pytest.mark.parametrize("content", [b"def f(:\n", b"\x00", b"# coding: nonsense\nX = 1\n", b"X = '\xff'\n"])
def test_a_file_that_does_not_parse_has_no_symbols(content: bytes, tmp_path: Path) -> None:
    there = surface(tmp_path, {"m.py": ""})
    (tmp_path / "vllm" / "m.py").write_bytes(content)
    assert there.find("vllm.m:X") is None
    assert there.find("vllm.m") is None


def test_a_file_that_python_warns_about_is_read_all_the_same(tmp_path: Path) -> None:
    there = surface(tmp_path, {"m.py": r"X = '\d'"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert there.find("vllm.m:X") is not None


@pytest.mark.parametrize(
    "files",
    [
        {"a.py": "from vllm.a import X"},
        {"a.py": "from vllm.b import X", "b.py": "from vllm.a import X"},
        {"a.py": "from .b import X", "b.py": "from . import X", "__init__.py": "from .a import X"},
        {"a.py": "class X(X): ..."},
        {"a.py": "from vllm.b import Y\nclass X(Y): ...", "b.py": "from vllm.a import X\nclass Y(X): ..."},
        {"a.py": "class X(Y, Z): ...\nclass Y(Z, X): ...\nclass Z(X, Y): ..."},
    ],
)
@pytest.mark.timeout(30)
def test_imports_and_bases_in_a_circle_come_to_an_end(files: dict[str, str], tmp_path: Path) -> None:
    assert surface(tmp_path, files).find("vllm.a:X.f") is None


def test_a_need_names_what_is_missing(tmp_path: Path) -> None:
    there = surface(tmp_path, {"m.py": "class C:\n    def f(self, a, odd, b=1): ...\n    def g(self, **kwargs): ..."})
    missing = {
        need: need.missing(there)
        for need in (
            need_module.Need("vllm.m:C.f", ("a", "b")),
            need_module.Need("vllm.m:C.f", ("a", "c", "d")),
            need_module.Need("vllm.m:C.f", supplied=frozenset({"a", "b"})),
            need_module.Need("vllm.m:C.f", ("c",), frozenset({"a", "odd"})),
            need_module.Need("vllm.m:C.g", ("anything",)),
            need_module.Need("vllm.m:C.h", ("a",), frozenset()),
            need_module.Need("vllm.n"),
        )
    }
    assert list(missing.values()) == [
        (),
        ("vllm.m:C.f(c)", "vllm.m:C.f(d)"),
        ("vllm.m:C.f(unknown required odd)",),
        ("vllm.m:C.f(c)",),
        (),
        ("vllm.m:C.h",),
        ("vllm.n",),
    ]


def test_the_trees_of_these_tests_lose_what_they_are_told_to(tmp_path: Path) -> None:
    gone = (
        "vllm.v1.engine.core:EngineCore.scheduler",
        "vllm.v1.core.sched.scheduler:Scheduler.has_requests",
        "vllm.sampling_params:SamplingParams",
        "vllm.v1.worker.gpu_worker",
    )
    kept = ("vllm.v1.engine.core:EngineCore.model_executor", "vllm.sampling_params", "vllm.v1.worker.gpu_input_batch")
    there = Surface(write_vllm(tmp_path, without=gone))
    assert [s for s in (*gone, *kept) if there.find(s) is None] == list(gone)
