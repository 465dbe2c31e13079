"""A model's final norm from its checkpoint, computed as HF transformers computes it.

Only model types that a test has compared with transformers are known: a norm that is nearly the right one would train
a draft model that is nearly right.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, cast

from vllm_compat.errors import UsageError
from vllm_compat.types import Tensor

__all__ = ["KNOWN", "FinalNorm", "load_final_norm"]

_Kind = Literal["rms", "rms_wide", "rms_plus_one", "layer"]
_INDEX = "model.safetensors.index.json"
_ONE_FILE = "model.safetensors"
_PREFIXES = ("", "language_model.", "model.language_model.")


@dataclass(frozen=True, slots=True)
class _Known:
    """How a type of model has it.

    Attributes:
        kind: ``rms`` rounds to the states' dtype before the weight, ``rms_wide`` after it; ``rms_plus_one`` after it,
            with 1 added to the weight; ``layer`` is LayerNorm.
        eps: the key of its epsilon in ``config.json``.
        name: of the weight, without ``.weight``.
    """

    kind: _Kind = "rms"
    eps: str = "rms_norm_eps"
    name: str = "model.norm"


_LLAMA = _Known()
_GEMMA = _Known("rms_plus_one")
KNOWN: Mapping[str, _Known] = {
    **dict.fromkeys(["llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"], _LLAMA),
    **dict.fromkeys(["deepseek_v2", "deepseek_v3", "phi3", "smollm3", "granite", "glm4"], _LLAMA),
    "gpt_oss": _Known("rms_wide"),
    **dict.fromkeys(["gemma", "gemma2", "gemma3_text"], _GEMMA),
    "starcoder2": _Known("layer", "norm_epsilon"),
    "gpt_neox": _Known("layer", "layer_norm_eps", "gpt_neox.final_layer_norm"),
}
"""``model_type`` -> its final norm."""
_SAME = {"kimi_k2": "deepseek_v3"}
"""Types whose own code is a copy of another's."""


@dataclass(frozen=True, slots=True, eq=False)
class FinalNorm:
    """A final norm.

    Attributes:
        kind: see ``_Known``.
        eps: added to the mean square, or the variance.
        weight: [hidden_size].
        bias: [hidden_size]; None without one.
    """

    kind: _Kind
    eps: float
    weight: Tensor
    bias: Tensor | None

    def __call__(self, states: Tensor) -> Tensor:
        """The states [tokens, hidden_size] after the norm, in their own dtype.

        Raises:
            UsageError: the model is of another width.
        """
        torch: Any = import_module("torch")
        if states.shape[-1] != self.weight.shape[0]:
            raise UsageError(
                f"the model is {self.weight.shape[0]} wide, the states are {states.shape[-1]}: not its own"
            )
        weight = self.weight.to(states.dtype)
        if self.kind == "layer":
            bias = None if self.bias is None else self.bias.to(states.dtype)
            return torch.nn.functional.layer_norm(states, weight.shape, weight, bias, self.eps)
        wide = states.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.kind == "rms":
            return weight * wide.to(states.dtype)
        if self.kind == "rms_wide":
            return (weight * wide).to(states.dtype)
        return (wide * (1.0 + weight.float())).to(states.dtype)


def load_final_norm(model: str) -> FinalNorm:
    """The final norm of a model in a local folder.

    Raises:
        UsageError: there is none that can be vouched for.
    """
    folder = Path(model)
    config = _config(folder)
    model_type = str(config.get("model_type"))
    known = KNOWN.get(_SAME.get(model_type, model_type))
    instead = f"Extract the state itself: --layer-ids ... norm. Known are {', '.join(sorted({*KNOWN, *_SAME}))}"
    if known is None:
        raise UsageError(f"{folder}: how the final norm of model type {model_type!r} works is not known. {instead}")
    eps = config.get(known.eps)
    if type(eps) is not float:
        raise UsageError(f"{folder / 'config.json'}: {known.eps} is {eps!r}, not a number. {instead}")
    found = {name: place for prefix in _PREFIXES for name, place in _tensors(folder, prefix + known.name)}
    weights = [name for name in found if name.endswith(".weight")]
    if len(weights) != 1:
        raise UsageError(f"{folder}: {len(weights)} tensors could be the final norm's weight: {weights}. {instead}")
    tensors = {name.rpartition(".")[2]: _read(path, name) for name, path in found.items()}
    return FinalNorm(known.kind, eps, tensors["weight"], tensors.get("bias"))


def _config(folder: Path) -> Mapping[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        text = found.get("text_config")
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"{folder / 'config.json'} cannot be read: {error}. --model wants a model's folder") from error
    return cast("Mapping[str, Any]", text if isinstance(text, dict) else found)


def _tensors(folder: Path, name: str) -> list[tuple[str, Path]]:
    """``name.weight`` and ``name.bias`` where they are."""
    wanted = [f"{name}.weight", f"{name}.bias"]
    try:
        if (folder / _INDEX).exists():
            places = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
            return [(tensor, folder / Path(places[tensor]).name) for tensor in wanted if tensor in places]
        with import_module("safetensors").safe_open(str(folder / _ONE_FILE), framework="pt") as file:
            names = set(file.keys())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{folder} has no weights in safetensors that can be read: {error!r}") from error
    return [(tensor, folder / _ONE_FILE) for tensor in wanted if tensor in names]


def _read(path: Path, name: str) -> Tensor:
    torch: Any = import_module("torch")
    library: Any = import_module("safetensors")
    try:
        with library.safe_open(str(path), framework="pt") as file:
            found = file.get_tensor(name)
    except (OSError, library.SafetensorError) as error:
        raise UsageError(f"{path}: {name} cannot be read: {error}") from error
    if found.dim() != 1 or found.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise UsageError(f"{path}: {name} is {found.dtype} {tuple(found.shape)}, not one number for each dimension")
    return found
