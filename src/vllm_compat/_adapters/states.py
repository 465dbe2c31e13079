"""How the state leaving a layer is read. Runs in the worker."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from vllm_compat._adapters.base import Behaviour
from vllm_compat._detect.need import Need

__all__ = ["BEHAVIOURS", "LayerHooks", "StateSource", "summands"]


class StateSource(Behaviour):
    """How the residual stream leaving a decoder layer is read."""

    variation = "states"

    @abstractmethod
    def install(self, layer: Any, receive: Callable[[Sequence[Any]], None]) -> Callable[[], None]:
        """Call ``receive`` each time ``layer`` runs, with its state as ``summands`` gives it.

        ``receive`` copies what it wants to keep: later layers write into these very tensors.

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
        Need("vllm.distributed.parallel_state:get_tensor_model_parallel_rank", supplied=frozenset()),
        Need("vllm.distributed.parallel_state:get_tensor_model_parallel_world_size", supplied=frozenset()),
    )

    def install(self, layer: Any, receive: Callable[[Sequence[Any]], None]) -> Callable[[], None]:
        def hook(module: Any, arguments: Any, output: Any) -> None:
            receive(summands(output, f"decoder layer {type(module).__name__}"))

        remove: Callable[[], None] = layer.register_forward_hook(hook).remove
        return remove


def summands(output: Any, giver: str) -> list[Any]:
    """What ``giver`` put out: a tensor [rows, hidden_size], or two that add up to the residual stream.

    Raises:
        TypeError: anything else.
    """
    import torch

    parts: list[Any] = list(output) if isinstance(output, (tuple, list)) else [output]
    if len(parts) == 2 and parts[1] is None:
        parts = parts[:1]
    # vLLM's Transformers backend runs HF's own layers, on a batch of one.
    parts = [p[0] if isinstance(p, torch.Tensor) and p.dim() == 3 and p.shape[0] == 1 else p for p in parts]
    if len(parts) not in (1, 2) or not all(
        isinstance(p, torch.Tensor) and p.dim() == 2 and p.shape == parts[0].shape for p in parts
    ):
        found = ", ".join(str(list(p.shape)) if isinstance(p, torch.Tensor) else type(p).__name__ for p in parts)
        raise TypeError(f"{giver} returns ({found}); wanted a tensor [rows, hidden_size], or two of them to add")
    return parts


BEHAVIOURS: tuple[type[StateSource], ...] = (LayerHooks,)
