"""The reference: every layer's states by HF transformers, which shares no code with vLLM or with us.

Hooks are used rather than ``output_hidden_states``, whose last entry has been through the final norm.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Generator, Sequence
from importlib import import_module
from typing import Any, Literal, TypeAlias

from vllm_compat.errors import VllmCompatError
from vllm_compat.types import NORM, LayerId, Tensor

__all__ = ["EMBED", "Name", "NoReferenceError", "Reference", "load_reference", "order"]

EMBED: Literal["embed"] = "embed"
Name: TypeAlias = LayerId | Literal["embed"]
"""A layer id, or ``"embed"``: what enters layer 0."""


class NoReferenceError(VllmCompatError):
    """HF transformers cannot compute the model here."""

    exit_code = 4


class Reference:
    """A model in HF transformers.

    Attributes:
        num_layers: decoder layers.
    """

    def __init__(self, model: Any, layers: Sequence[Any], device: str) -> None:
        self.num_layers = len(layers)
        self._model = model
        self._layers = layers
        self._device = device

    def states(self, token_ids: Sequence[int]) -> dict[Name, Tensor]:
        """``"embed"``, every layer and ``"norm"``, each [tokens, hidden_size] in float32 on the CPU."""
        torch: Any = import_module("torch")
        found: dict[Name, Tensor] = {}

        def keep(name: Name, value: Any) -> None:
            state = value[0] if isinstance(value, (tuple, list)) else value  # a tuple in older releases
            found[name] = state[0].float().cpu()

        def before(_module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            keep(EMBED, arguments[0] if arguments else named["hidden_states"])

        handles = [self._layers[0].register_forward_pre_hook(before, with_kwargs=True)]
        for k, layer in enumerate(self._layers):
            handles.append(layer.register_forward_hook(lambda _m, _a, output, k=k: keep(k, output)))
        try:
            with torch.inference_mode():
                result = self._model(torch.tensor([list(token_ids)], device=self._device), use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        keep(NORM, result.last_hidden_state)
        return {name: found[name] for name in order(self.num_layers)}


def order(num_layers: int) -> tuple[Name, ...]:
    """Every state of a model, in the order in which they are computed."""
    return (EMBED, *range(num_layers), NORM)


def load_reference(model: str, dtype: str, *, device: str, trust_remote_code: bool) -> Reference:
    """Load a model; nothing is downloaded.

    Args:
        model: a folder, or a name of the hub that is in the local cache.
        dtype: of weights and computation: ``"float32"`` or ``"bfloat16"``.
        device: where to compute.
        trust_remote_code: let the model bring its own code.

    Raises:
        NoReferenceError: transformers is not installed, does not know the model, or has no weights for some of it.
    """
    try:
        torch: Any = import_module("torch")
        transformers: Any = import_module("transformers")
    except ImportError as error:
        raise NoReferenceError(f"computing again takes torch and transformers: {error}") from error
    # Loading and then casting would cast RoPE's frequencies too, which a bfloat16 model keeps in float32.
    config_class = transformers.PretrainedConfig
    keyword = "dtype" if hasattr(config_class(), "dtype") else "torch_dtype"  # the old name warns in newer releases
    options: dict[str, Any] = {
        keyword: getattr(torch, dtype),
        "attn_implementation": "eager",
        "local_files_only": True,
        "trust_remote_code": trust_remote_code,
        "output_loading_info": True,
    }
    try:
        with _silenced(transformers):
            loaded, info = transformers.AutoModel.from_pretrained(model, **options)
    except Exception as error:  # whatever transformers raises for what it does not know, or cannot load
        raise NoReferenceError(f"transformers cannot load {model}: {_first_line(error)}") from error
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise NoReferenceError(
            f"transformers finds no weights for {len(missing)} tensors of {model}, first {missing[0]}"
        )
    return Reference(loaded.eval().to(device), _find_layers(loaded), device)


def _find_layers(model: Any) -> Sequence[Any]:
    """The decoder layers: the list of modules beside the vocabulary's embedding.

    Raises:
        NoReferenceError: there is none, or more than one.
    """
    torch: Any = import_module("torch")
    embedding = model.get_input_embeddings()
    lists = [
        child
        for module in model.modules()
        if any(child is embedding for child in module.children())
        for child in module.children()
        if isinstance(child, torch.nn.ModuleList) and len(child)
    ]
    if len(lists) != 1:
        raise NoReferenceError(
            f"{type(model).__name__} has {len(lists)} lists of layers beside its embedding, wanted one"
        )
    layers: Sequence[Any] = lists[0]
    return layers


@contextlib.contextmanager
def _silenced(transformers: Any) -> Generator[None, None, None]:
    """Without the report on ``lm_head``, whose weights are left out on purpose, and without bars."""
    log = transformers.utils.logging
    before = log.get_verbosity()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.set_verbosity(before)
        log.enable_progress_bar()


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
