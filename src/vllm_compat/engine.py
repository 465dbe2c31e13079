"""The stable API: an ``Engine``, and the two ways to get one.

Nothing here knows vLLM. ``_engine`` does, and is imported when an engine is opened.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from vllm_compat.types import CapturedStates, LayerId, StepResult

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Engine", "attach", "get_captured_states", "make_request", "open_engine", "run_step"]


class Engine(ABC):
    """Requests in, steps, captured states out; a context manager that ends every effect it began.

    A loop that serves any number of requests::

        for request_id, token_ids in samples:
            engine.make_request(token_ids, request_id=request_id)
        while engine.has_unfinished:
            engine.run_step()
            for states in engine.get_captured_states():
                save(states)

    An engine belongs to one thread.
    """

    layer_ids: tuple[LayerId, ...]
    """What is captured, in the order it was asked for; empty when nothing is."""
    num_layers: int
    """Decoder layers of the model."""
    hidden_size: int
    """Width of every captured row."""
    vocab_size: int
    """Token ids lie in ``range(vocab_size)``."""
    max_model_len: int
    """A prompt must be shorter than this: the token sampled after it needs a place."""

    @abstractmethod
    def make_request(
        self,
        token_ids: Sequence[int],
        *,
        request_id: str | None = None,
        max_tokens: int = 1,
        sampling: Mapping[str, Any] | None = None,
        ignore_eos: bool = False,
        add: bool = True,
    ) -> Any:
        """Make one request and queue it.

        Args:
            token_ids: the prompt; at least one id, fewer than ``max_model_len``.
            request_id: any text that no unfinished or uncollected request has; made up when left out.
            max_tokens: tokens to sample. One is what a prefill needs; more makes the model answer, and the states of
                the answer are captured in the same pass.
            sampling: fields of vLLM's ``SamplingParams`` (``temperature``, ``top_p``, ``seed`` ...). Greedy by default.
            ignore_eos: go on to ``max_tokens`` though the model ends its answer.
            add: queue the request. False for a caller who queues it in a scheduler of his own.

        Returns:
            vLLM's own ``Request``, valid for the installed release. Block hashes are included exactly when the engine
            needs them: with prefix caching, or a KV connector.

        Raises:
            RequestError: an empty, too long or out-of-vocabulary prompt, or a request id in use.
        """

    @abstractmethod
    def run_step(self, meanwhile: Callable[[], None] | None = None) -> StepResult:
        """Run one step: schedule, forward, sample, update. Returns at once when there is nothing to do.

        Args:
            meanwhile: called once in a step that is run, between the forward pass and its sampling: where steps have
                two phases the device is at work then, and would else stand still for what a caller does between steps.
                It may make requests, which the next step can choose, and get the states of earlier steps' requests
                with ``wait=False``. What it raises is raised when the step is done.

        Raises:
            StepError: vLLM failed; the engine is closed and ``__cause__`` has the reason.
        """

    @abstractmethod
    def get_captured_states(self, *, wait: bool = True) -> list[CapturedStates]:
        """The states of every request that finished since the last call, in the order the requests were made.

        States are there as soon as a step has reported the request in ``StepResult.finished``. A request that was
        aborted, or that vLLM itself failed, is left out. Each row has been checked against the token that was
        forwarded for it.

        Args:
            wait: for states that have not reached the host yet. False leaves them to a later call, so that the device
                need not stand still: they are copied beside its work, and ready at the latest when the next step has
                run. Their request ids stay in use until then. A caller's last call waits: after it comes no step.

        Raises:
            CaptureError: rows are missing or are not the request's own; the engine is closed.
        """

    @abstractmethod
    def abort(self, *request_ids: str) -> None:
        """Drop these unfinished requests and their states. Unknown and finished ids are ignored."""

    @property
    @abstractmethod
    def has_unfinished(self) -> bool:
        """True while a request still needs ``run_step``."""

    @abstractmethod
    def close(self) -> None:
        """End every effect: an engine of ``open_engine`` is shut down, one of ``attach`` is left as it was found."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """True after ``close`` or a failed step."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_engine(
    model: str,
    *,
    layer_ids: Sequence[LayerId] = (),
    tensor_parallel_size: int = 1,
    shared_states_bytes: int = 1 << 30,
    **engine_options: Any,
) -> Engine:
    """Build an engine in this process (its workers may be processes of their own).

    Args:
        model: a folder or a name that vLLM accepts.
        layer_ids: what to capture; see ``vllm_compat.types``. The order is kept.
        tensor_parallel_size: GPUs to split each layer over.
        shared_states_bytes: with ``enable_prefix_caching=True``, of how many bytes of states requests may share the
            beginning; twice as many are kept in host memory. A small number makes beginnings be forwarded again.
        **engine_options: fields of vLLM's ``EngineArgs`` (``dtype``, ``max_model_len`` ...).

    While capturing the model runs eager, since a compiled model passes a tap by in silence. With
    ``enable_prefix_caching=True`` requests that begin with the same tokens share them: they are forwarded once, and
    their states handed out for each. Such tensors may share memory, so do not write into them. Without it, which is the
    default, every token is forwarded. The tokenizer is not loaded unless ``skip_tokenizer_init=False``.

    Raises:
        UsageError: an option that is unknown, or that cannot go with capturing. Nothing was loaded yet.
        UnsupportedVllmError: no behaviour fits the installed vLLM.
        UnsupportedModelError: the model's decoder layers could not be found.
    """
    from vllm_compat._engine.build import build

    options = {"tensor_parallel_size": tensor_parallel_size, **engine_options}
    return build(model, tuple(layer_ids), options, shared_states_bytes)


def attach(
    core: Any = None,
    *,
    scheduler: Any = None,
    executor: Any = None,
    layer_ids: Sequence[LayerId] = (),
) -> Engine:
    """Wrap what the caller built: an ``EngineCore``, or a scheduler and an executor.

    Args:
        core: vLLM's ``EngineCore``, in this process.
        scheduler: in place of ``core``, together with ``executor``.
        executor: in place of ``core``, together with ``scheduler``.
        layer_ids: what to capture.

    Closing the ``Engine`` takes the taps out again and leaves the rest running.

    Raises:
        AttachError: what was given cannot be driven (async scheduling), or not captured (prefix caching on, a compiled
            model, pipeline parallel, speculative decoding).
    """
    from vllm_compat._engine.build import wrap

    return wrap(core, scheduler, executor, tuple(layer_ids))


def make_request(engine: Engine, token_ids: Sequence[int], **options: Any) -> Any:
    """``engine.make_request(token_ids, **options)``."""
    return engine.make_request(token_ids, **options)


def run_step(engine: Engine, meanwhile: Callable[[], None] | None = None) -> StepResult:
    """``engine.run_step(meanwhile)``."""
    return engine.run_step(meanwhile)


def get_captured_states(engine: Engine, *, wait: bool = True) -> list[CapturedStates]:
    """``engine.get_captured_states(wait=wait)``."""
    return engine.get_captured_states(wait=wait)
