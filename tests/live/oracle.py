"""The reference: HF transformers, run one prompt at a time."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any


@functools.cache
def _load(model: Path, dtype: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").to(getattr(torch, dtype))
    return loaded.eval()


def _layers(model: Any, num_layers: int) -> Any:
    import torch

    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == num_layers]
    (layers,) = lists
    return layers


def states(model: Path, token_ids: Sequence[int], dtype: str = "float32") -> dict[int | str, Any]:
    """Layer id -> [tokens, hidden_size]: the raw output of each decoder layer, and ``"norm"``.

    ``hidden_states[n]`` of HF is after the final norm, hence the hooks. Over SmolLM2's 30 layers the rounding of
    float32 adds up to 5e-6, HF's as well as vLLM's: there the reference is ``"float64"``, in which the HF of
    2025 cannot run a mixture of experts.
    """
    import torch

    loaded = _load(model, dtype)
    out: dict[int | str, Any] = {}

    def keep(layer_id: int) -> Any:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            out[layer_id] = (output[0] if isinstance(output, tuple) else output)[0]

        return hook

    handles = [
        layer.register_forward_hook(keep(k)) for k, layer in enumerate(_layers(loaded, loaded.config.num_hidden_layers))
    ]
    try:
        with torch.no_grad():
            result = loaded(torch.tensor([list(token_ids)]), output_hidden_states=True, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    out["norm"] = result.hidden_states[-1][0]
    return out


def greedy(model: Path, token_ids: Sequence[int], count: int) -> list[int]:
    """The next ``count`` tokens, each the likeliest."""
    import torch

    loaded = _load(model, "float32")
    ids = list(token_ids)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(loaded(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(token_ids) :]


def greedy_whole(model: Path, token_ids: Sequence[int], count: int) -> list[int]:
    """The tokens and ``count`` more, or fewer where one of these ends the answer."""
    ends = _load(model, "float32").generation_config.eos_token_id
    answer = greedy(model, token_ids, count)
    end = next((at for at, token in enumerate(answer) if token in (ends if isinstance(ends, list) else [ends])), count)
    return [*token_ids, *answer[: end + 1]]


def output_embedding(model: Path) -> Any:
    """The weights of ``lm_head``, [vocabulary, hidden_size]."""
    return _load(model, "float32").get_output_embeddings().weight.detach()


def error(found: Any, reference: Any) -> float:
    """The greatest relative L2 error of any token's state."""
    apart = (found.double() - reference.double()).norm(dim=1) / reference.double().norm(dim=1)
    return float(apart.max())


def typical_error(found: Any, reference: Any) -> float:
    """Root mean square over the tokens of each token's own relative L2 error.

    For bfloat16. The norm of all tokens together is that of the first one, which is hundreds of times greater than the
    others in a trained model: a single draw of rounding noise, and the ratio of two such draws is anything.
    """
    apart = (found.double() - reference.double()).norm(dim=1) / reference.double().norm(dim=1)
    return float(apart.square().mean().sqrt())
