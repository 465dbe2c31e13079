"""The end of a model, out of its checkpoint: the final norm and ``lm_head``, found by name, shape and neighbourhood."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_compat.convert.norm import KNOWN, FinalNorm
from vllm_compat.extract.model import NAMES
from vllm_compat.types import Tensor
from vllm_compat.verify.checkpoint import Checkpoint, CheckpointError

__all__ = ["Head", "load_head"]

_EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings", "embeddings")
_HEADS = ("lm_head", "embed_out", "output_layer", "output")
_NORMS = ("norm", "ln_f", "norm_f", "final_layernorm", "final_layer_norm", "embedding_norm")
_EPSILONS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps")
_LOGITS_AT_ONCE = 1 << 13  # rows of lm_head that are in float32 at a time


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """What turns a model's last state into logits.

    Attributes:
        name: of the weight in the checkpoint.
        weight: [vocabulary, hidden_size].
        bias: [vocabulary]; None without one.
        norms: the model type's kind of norm; where that is not known, the kinds that the tensors allow.
        cap: logits are ``cap * tanh(logit / cap)``; None when they are not capped.
    """

    name: str
    weight: Tensor = field(repr=False)
    bias: Tensor | None = field(repr=False)
    norms: tuple[FinalNorm, ...]
    cap: float | None

    def best(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """The largest logit of each state, in float32, and its token.

        Args:
            states: [n, hidden_size] in float32, after the norm.
        """
        values = tokens = None
        for begin in range(0, self.weight.shape[0], _LOGITS_AT_ONCE):
            logits = states @ self.weight[begin : begin + _LOGITS_AT_ONCE].float().T
            if self.bias is not None:
                logits += self.bias[begin : begin + _LOGITS_AT_ONCE].float()
            most, at = logits.max(-1)
            if values is None or tokens is None:
                values, tokens = most, at
            else:
                higher = most > values
                values, tokens = most.where(higher, values), (at + begin).where(higher, tokens)
        return values, tokens

    def logits(self, states: Tensor, tokens: Tensor) -> Tensor:
        """The logit of one token for each state, in float32."""
        found = (states * self.weight[tokens].float()).sum(-1)
        return found if self.bias is None else found + self.bias[tokens].float()


def load_head(checkpoint: Checkpoint, device: str) -> Head:
    """The end of a model, on a device of torch's.

    Raises:
        CheckpointError: something of it is not there, or not unique.
    """
    vocabulary = checkpoint.number(*NAMES["vocab_size"])
    width = checkpoint.number(*NAMES["hidden_size"])
    if not isinstance(vocabulary, int) or not isinstance(width, int):
        raise CheckpointError("config.json has no vocab_size and hidden_size")
    embedding = _one(checkpoint, "embedding", _EMBEDDINGS, (vocabulary, width))
    tied = checkpoint.config.get("tie_word_embeddings")
    untied = [] if tied is True else _named(checkpoint, _HEADS, (vocabulary, width))
    if not untied and tied is False:
        raise CheckpointError(f"no lm_head is {vocabulary} by {width}, and it is not tied to the embedding")
    name = _one(checkpoint, "lm_head", _HEADS, (vocabulary, width)) if untied else embedding
    bias = f"{name.removesuffix('.weight')}.bias"
    cap = checkpoint.number("final_logit_softcapping")
    return Head(
        name=name,
        weight=checkpoint.tensor(name)[:vocabulary].to(device),  # vLLM cuts off what a checkpoint pads
        bias=checkpoint.tensor(bias)[:vocabulary].to(device) if bias in checkpoint.names else None,
        norms=_norms(checkpoint, embedding, width, device),
        cap=None if cap is None else float(cap),
    )


def _norms(checkpoint: Checkpoint, embedding: str, width: int, device: str) -> tuple[FinalNorm, ...]:
    found = _named(checkpoint, _NORMS, (width,))
    beside = [name for name in found if _parent(name) == _parent(embedding)] or found
    if len(beside) != 1:
        raise CheckpointError(f"the final norm is one tensor, found {', '.join(beside) or 'none'}")
    epsilon = checkpoint.number(*_EPSILONS)
    if epsilon is None:
        raise CheckpointError(f"config.json has none of {', '.join(_EPSILONS)}")
    weight = checkpoint.tensor(beside[0]).float().to(device)
    name = f"{beside[0].removesuffix('.weight')}.bias"
    bias = checkpoint.tensor(name).float().to(device) if name in checkpoint.names else None
    known = KNOWN.get(str(checkpoint.config.get("model_type")))
    if known:
        return (FinalNorm(known.kind, epsilon, weight, bias),)
    layer_norm = FinalNorm("layer", epsilon, weight, bias)
    if bias is not None:
        return (layer_norm,)
    return FinalNorm("rms", epsilon, weight, None), FinalNorm("rms_plus_one", epsilon, weight, None), layer_norm


def _one(checkpoint: Checkpoint, what: str, names: Sequence[str], shape: tuple[int, ...]) -> str:
    found = _named(checkpoint, names, shape)
    if len(found) != 1:
        wanted = " by ".join(map(str, shape))
        raise CheckpointError(f"the {what} is one tensor of {wanted}, found {', '.join(found) or 'none'}")
    return found[0]


def _named(checkpoint: Checkpoint, names: Sequence[str], shape: tuple[int, ...]) -> list[str]:
    """Weights of these names and this shape that are outside any layer; a vocabulary may be padded."""
    found = []
    for name in checkpoint.names:
        *parents, last, suffix = ["", *name.split(".")]
        if suffix == "weight" and last in names and not any(part.isdecimal() for part in parents):
            own = checkpoint.shape(name)
            if own == shape or (len(shape) == 2 and own[1:] == shape[1:] and own[0] > shape[0]):
                found.append(name)
    return found


def _parent(name: str) -> str:
    return name.rpartition(".")[0].rpartition(".")[0]
