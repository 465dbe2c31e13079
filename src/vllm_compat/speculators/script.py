"""A script run as ``python SCRIPT ARGS...`` would run it, with our generator in the place of speculators'."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from vllm_compat.errors import UsageError
from vllm_compat.speculators.replaced import generator_replaced

__all__ = ["SCRIPT", "code_of", "run_script"]

SCRIPT = "VLLM_COMPAT_SPECULATORS_SCRIPT"
"""The environment variable that tells a spawned process which script it belongs to."""
_OF_A_CHILD = "vllm_compat.speculators.spawned"


def run_script(script: str, arguments: Sequence[str]) -> None:
    """Run it to its end, as ``__main__``; afterwards the interpreter is as it was.

    A process that it spawns (vLLM's workers) imports ``__main__`` again, as multiprocessing has it, and finds our
    generator there too.

    Args:
        script: path of a Python file.
        arguments: its command line.

    Raises:
        UsageError: the file cannot be read, or is no Python.
        BaseException: whatever the script raises, ``SystemExit`` included.
    """
    path = str(Path(script).absolute())
    code = code_of(path)
    main = ModuleType("__main__")
    main.__file__ = path
    main.__spec__ = ModuleSpec(_OF_A_CHILD, None, origin=path)
    kept = sys.argv, sys.path[:], sys.modules["__main__"]
    rest = sys.path[1:] if sys.path[:1] in ([""], [str(Path.cwd())]) else sys.path[:]  # `python -m` put that there
    sys.argv, sys.path[:], sys.modules["__main__"] = [path, *arguments], [str(Path(path).parent), *rest], main
    os.environ[SCRIPT] = path
    try:
        with generator_replaced():
            exec(code, vars(main))
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = kept
        del os.environ[SCRIPT]


def code_of(path: str) -> Any:
    """The compiled script.

    Raises:
        UsageError: the file cannot be read, or is no Python.
    """
    try:
        return compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError) as error:
        raise UsageError(f"{path} cannot be run: {error}") from error
