"""How the state leaving a layer is read. Runs in the worker."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from vllm_compat._adapters.base import Behaviour
from vllm_compat._detect.need import Need

__all__ = ["BEHAVIOURS", "LayerHooks", "StateSource"]


class StateSource(Behaviour):
    """How the residual stream leaving a decoder layer is read."""

    variation = "states"

    @abstractmethod
    def install(self, layer: Any, receive: Callable[[Any], None]) -> Callable[[], None]:
        """Call ``receive`` with a tensor of its own, [rows, hidden_size], each time ``layer`` runs.

        Returns:
            A function that takes it out again.
        """


class LayerHooks(StateSource):
    """Forward hooks on the decoder layers themselves: any model and both runners, as long as it runs eager.

    vLLM's layers hand the next layer either the residual stream, or its two summands (hidden, residual) for the next
    norm to add.
    """

    name = "layer-hooks"
    needs: ClassVar = (
        Need("vllm.v1.worker.worker_base:WorkerBase"),
        Need("vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding"),
    )

    def install(self, layer: Any, receive: Callable[[Any], None]) -> Callable[[], None]:
        def hook(module: Any, arguments: Any, output: Any) -> None:
            receive(residual_stream(output, type(module).__name__))

        remove: Callable[[], None] = layer.register_forward_hook(hook).remove
        return remove


def residual_stream(output: Any, layer: str) -> Any:
    """The residual stream in a decoder layer's output, as a tensor that nothing else writes to.

    Raises:
        TypeError: an output that is neither a tensor [rows, hidden_size] nor its two summands.
    """
    import torch

    parts: list[Any] = list(output) if isinstance(output, (tuple, list)) else [output]
    if len(parts) == 2 and parts[1] is None:
        parts = parts[:1]
    if (
        not all(isinstance(p, torch.Tensor) and p.dim() == 2 and p.shape == parts[0].shape for p in parts)
        or len(parts) > 2
    ):
        found = ", ".join(str(list(p.shape)) if isinstance(p, torch.Tensor) else type(p).__name__ for p in parts)
        raise TypeError(
            f"decoder layer {layer} returns ({found}); wanted a tensor [rows, hidden_size], or two of them to add"
        )
    # Later layers write into these very buffers, so the sum or the copy is made now.
    return parts[0].clone() if len(parts) == 1 else parts[0] + parts[1]


BEHAVIOURS: tuple[type[StateSource], ...] = (LayerHooks,)
