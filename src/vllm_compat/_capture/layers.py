"""Find a model's decoder layers by structure, whatever its class calls them."""

from __future__ import annotations

from typing import Any

from vllm_compat.errors import UnsupportedModelError

__all__ = ["find_decoder_layers"]


def find_decoder_layers(model: Any, num_layers: int) -> Any:
    """The ``ModuleList`` of the ``num_layers`` decoder layers.

    They are the list of that length beside the embedding of the vocabulary, which no vision or audio tower has. Failing
    that, the only list of that length in the whole model.

    Raises:
        UnsupportedModelError: none, or several that cannot be told apart.
    """
    import torch
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    found: dict[str, Any] = {}
    beside_embedding: list[str] = []
    for path, module in model.named_modules():
        children = dict(module.named_children())
        lists = [n for n, c in children.items() if isinstance(c, torch.nn.ModuleList) and len(c) == num_layers]
        embeds = any(type(c) is VocabParallelEmbedding for c in children.values())
        for name in lists:
            place = f"{path}.{name}" if path else name
            found[place] = children[name]
            if embeds:
                beside_embedding.append(place)
    places = beside_embedding or list(found)
    if len(places) == 1:
        return found[places[0]]
    raise UnsupportedModelError(
        f"{type(model).__name__}: looked for one list of {num_layers} decoder layers beside the vocabulary's "
        f"embedding, found {', '.join(places) or 'none'}. Please report the model; this release cannot capture it."
    )
