"""From an engine's states to a sample's data: only when they are those of the sample."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_compat.errors import CaptureError, NonFiniteError
from vllm_compat.extract.answers import answered
from vllm_compat.extract.config import SaveDtype
from vllm_compat.extract.inputs import Sample
from vllm_compat.extract.tensors import stack_states
from vllm_compat.formats import SampleData
from vllm_compat.types import NORM, CapturedStates, LayerId

__all__ = ["SampleMaker"]


@dataclass(frozen=True, slots=True)
class SampleMaker:
    """Checks states and puts them together.

    Attributes:
        layer_ids: what was captured, in the order of the second dimension.
        hidden_size: width of a state.
        save_dtype: dtype of the result.
        generate: whether samples are prompts, whose answers come with the states.
        about: metadata that every sample gets.
    """

    layer_ids: tuple[LayerId, ...]
    hidden_size: int
    save_dtype: SaveDtype
    generate: bool
    about: Mapping[str, str] = field(repr=False)

    def make(self, sample: Sample, states: CapturedStates) -> SampleData:
        """The sample's data.

        Raises:
            CaptureError: the states are not the sample's.
            NonFiniteError: they are not finite.
        """
        whole = answered(sample, states) if self.generate else sample
        self._check(whole, states)
        try:
            stacked = stack_states(states.hidden_states, self.layer_ids, self.save_dtype)
        except NonFiniteError as error:
            raise NonFiniteError(f"{_name(sample)}: {error}") from error
        sampled = states.output_token_ids[-1:]
        metadata = {
            **self.about,
            "post_norm": json.dumps([layer_id == NORM for layer_id in self.layer_ids]),
            "sampled_token": "".join(map(str, sampled)),
            **({"num_prompt_tokens": str(len(sample.token_ids))} if self.generate else {}),
        }
        return SampleData(whole.index, whole.id, whole.token_ids, whole.loss_mask, self.layer_ids, stacked, metadata)

    def _check(self, sample: Sample, states: CapturedStates) -> None:
        """Raise unless the states are of this sample's tokens, of these layers, and of the right shapes."""
        if states.token_ids != sample.token_ids:
            pairs = zip(states.token_ids, sample.token_ids, strict=False)
            shorter = min(len(states.token_ids), len(sample.token_ids))
            at = next((i for i, (got, own) in enumerate(pairs) if got != own), shorter)
            raise CaptureError(
                f"{_name(sample)}: the states are of other tokens: {len(states.token_ids)} where the sample has "
                f"{len(sample.token_ids)}, different from position {at} on. Nothing of this run is trustworthy."
            )
        if states.layer_ids != self.layer_ids:
            raise CaptureError(
                f"{_name(sample)}: states of the layers {states.layer_ids} came, {self.layer_ids} were asked for"
            )
        wanted = [(len(sample.token_ids), self.hidden_size)] * len(self.layer_ids)
        shapes = [tuple(getattr(tensor, "shape", ())) for tensor in states.hidden_states]
        if shapes != wanted:
            raise CaptureError(f"{_name(sample)}: the states have the shapes {shapes}, {wanted} were expected")


def _name(sample: Sample) -> str:
    return f"sample {sample.index} (line {sample.line})"
