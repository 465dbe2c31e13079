"""One stable API over vLLM's moving internals, and hidden-state extraction built on it.

``open_engine`` builds an engine, ``attach`` wraps one that the caller built; both give an ``Engine``, a context manager
with ``make_request``, ``run_step`` and ``get_captured_states``. ``detect`` says which vLLM is installed and what serves
it. Importing this package imports neither vLLM nor torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_compat.detection import Detection, detect
    from vllm_compat.engine import Engine, attach, get_captured_states, make_request, open_engine, run_step
    from vllm_compat.errors import (
        AttachError,
        CaptureError,
        EngineClosedError,
        InputError,
        JournalError,
        NonFiniteError,
        PendingStepError,
        RequestError,
        RunMismatchError,
        StalledStepError,
        StepError,
        StoppedError,
        StorageError,
        TokenMismatchError,
        UnsupportedModelError,
        UnsupportedVllmError,
        UsageError,
        VllmCompatError,
        VllmNotFoundError,
    )
    from vllm_compat.types import CapturedStates, LayerId, StepResult

__version__ = "0.1.0"

_HOME = {
    "Detection": "detection",
    "detect": "detection",
    "Engine": "engine",
    "attach": "engine",
    "get_captured_states": "engine",
    "make_request": "engine",
    "open_engine": "engine",
    "run_step": "engine",
    "CapturedStates": "types",
    "LayerId": "types",
    "StepResult": "types",
    "AttachError": "errors",
    "CaptureError": "errors",
    "EngineClosedError": "errors",
    "InputError": "errors",
    "JournalError": "errors",
    "NonFiniteError": "errors",
    "PendingStepError": "errors",
    "RequestError": "errors",
    "RunMismatchError": "errors",
    "StalledStepError": "errors",
    "StepError": "errors",
    "StoppedError": "errors",
    "StorageError": "errors",
    "TokenMismatchError": "errors",
    "UnsupportedModelError": "errors",
    "UnsupportedVllmError": "errors",
    "UsageError": "errors",
    "VllmCompatError": "errors",
    "VllmNotFoundError": "errors",
}

__all__ = [
    "AttachError",
    "CaptureError",
    "CapturedStates",
    "Detection",
    "Engine",
    "EngineClosedError",
    "InputError",
    "JournalError",
    "LayerId",
    "NonFiniteError",
    "PendingStepError",
    "RequestError",
    "RunMismatchError",
    "StalledStepError",
    "StepError",
    "StepResult",
    "StoppedError",
    "StorageError",
    "TokenMismatchError",
    "UnsupportedModelError",
    "UnsupportedVllmError",
    "UsageError",
    "VllmCompatError",
    "VllmNotFoundError",
    "__version__",
    "attach",
    "detect",
    "get_captured_states",
    "make_request",
    "open_engine",
    "run_step",
]


def __getattr__(name: str) -> Any:
    try:
        home = _HOME[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
