"""The module of speculators' generator, replaced in this process by one that has ours; nothing installed is touched."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["REPLACED", "Replacement", "generator_replaced"]

REPLACED = "speculators.data_generation.vllm_hidden_states_generator"


class Replacement(MetaPathFinder, Loader):
    """Answers for one module name, before anything that is installed does."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module that has ours, for that name; None for every other."""
        del path, target
        return ModuleSpec(fullname, self, origin=__spec__.origin) if fullname == REPLACED else None

    def exec_module(self, module: ModuleType) -> None:
        """Put our class into the new module."""
        from vllm_compat.speculators.generator import VllmHiddenStatesGenerator

        module.__doc__ = VllmHiddenStatesGenerator.__doc__
        vars(module).update(VllmHiddenStatesGenerator=VllmHiddenStatesGenerator, __all__=["VllmHiddenStatesGenerator"])


@contextlib.contextmanager
def generator_replaced() -> Generator[None, None, None]:
    """While it lasts, who imports speculators' generator gets ours.

    Raises:
        RuntimeError: its own has been imported already.
    """
    if REPLACED in sys.modules:
        raise RuntimeError(f"{REPLACED} has been imported already; replace it before anything imports speculators")
    replacement = Replacement()
    sys.meta_path.insert(0, replacement)
    try:
        yield
    finally:
        sys.meta_path.remove(replacement)
        for name in [m for m in sys.modules if m == "speculators" or m.startswith("speculators.")]:
            del sys.modules[name]  # they hold on to ours
