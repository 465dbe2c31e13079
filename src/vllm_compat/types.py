"""What crosses the API: frozen data in our own words, no object of vLLM's.

A state is named by its layer id. ``k`` (0-based) is the residual stream LEAVING decoder layer ``k``, before the final
norm: ``hidden_states[k + 1]`` of HF transformers for ``k < n - 1``, and auxiliary id ``k + 1`` inside vLLM. ``"norm"``
is the state after the final norm, the one that ``lm_head`` receives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

__all__ = ["NORM", "CapturedStates", "LayerId", "StepResult", "Tensor"]

NORM: Literal["norm"] = "norm"
LayerId: TypeAlias = int | Literal["norm"]
Tensor: TypeAlias = Any
"""A CPU ``torch.Tensor`` from a real engine; whatever its factory makes from the fake one."""


def _nothing() -> Mapping[str, Any]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did.

    Attributes:
        num_scheduled_tokens: request id -> tokens forwarded in this step.
        sampled_token_ids: request id -> tokens sampled in this step; absent while a prompt is still in pieces.
        finished: request id -> reason: ``"stop"``, ``"length"``, ``"abort"`` or another word of vLLM's.
    """

    num_scheduled_tokens: Mapping[str, int] = field(default_factory=_nothing)
    sampled_token_ids: Mapping[str, tuple[int, ...]] = field(default_factory=_nothing)
    finished: Mapping[str, str] = field(default_factory=_nothing)

    @property
    def idle(self) -> bool:
        """True when there was nothing to run."""
        return not self.num_scheduled_tokens and not self.finished


@dataclass(frozen=True, slots=True, eq=False)
class CapturedStates:
    """The states of one finished request. Compared by identity: tensors have no one truth value.

    Attributes:
        request_id: the id given to ``make_request``.
        token_ids: the tokens that were forwarded, one for each row. With ``max_tokens`` > 1 these are the prompt and
            the generated tokens but the last, which was sampled and never forwarded.
        num_prompt_tokens: how many of them are the prompt.
        output_token_ids: every sampled token, the last one included.
        layer_ids: what was captured, in the order it was asked for.
        hidden_states: for each layer id a tensor [len(token_ids), hidden_size] on the CPU, in the model's own dtype; as
            a rule a column of one tensor [tokens, layers, hidden_size], so its rows are not side by side, and a clone
            keeps it without the others.
        finish_reason: why the request ended, as in ``StepResult.finished``.
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    output_token_ids: tuple[int, ...]
    layer_ids: tuple[LayerId, ...]
    hidden_states: tuple[Tensor, ...] = field(repr=False)
    finish_reason: str

    def __getitem__(self, layer_id: LayerId) -> Tensor:
        """The tensor of one layer, by its id."""
        return self.hidden_states[self.layer_ids.index(layer_id)]
