"""From an engine's states to a committed sample: only when they are those of the sample."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_compat.errors import CaptureError, NonFiniteError
from vllm_compat.extract.config import OnNonFinite, SaveDtype
from vllm_compat.extract.inputs import Sample
from vllm_compat.extract.journal import Entry
from vllm_compat.extract.store import Store
from vllm_compat.extract.tensors import stack_states
from vllm_compat.formats import SampleData
from vllm_compat.types import NORM, CapturedStates, LayerId

__all__ = ["SampleWriter", "check_states"]


@dataclass(frozen=True, slots=True)
class SampleWriter:
    """Checks samples and commits them.

    Attributes:
        store: where they go.
        layer_ids: what was captured, in the order of the file's second dimension.
        hidden_size: width of a state.
        save_dtype: dtype of the states on disk.
        on_nonfinite: what a state that is not finite does.
        about: metadata that every file gets.
    """

    store: Store
    layer_ids: tuple[LayerId, ...]
    hidden_size: int
    save_dtype: SaveDtype
    on_nonfinite: OnNonFinite
    about: Mapping[str, str] = field(repr=False)

    def write(self, sample: Sample, states: CapturedStates) -> Entry | None:
        """Check the states and commit the sample. After the first error nothing more is committed: None is returned.

        Raises:
            CaptureError: the states are not the sample's, or not finite.
            StorageError: the file system refused.
        """
        try:
            return self._write(sample, states)
        except BaseException:
            self.store.refuse()
            raise

    def _write(self, sample: Sample, states: CapturedStates) -> Entry | None:
        check_states(sample, states, self.layer_ids, self.hidden_size)
        sampled = states.output_token_ids[-1] if states.output_token_ids else None
        try:
            stacked = stack_states(states.hidden_states, self.layer_ids, self.save_dtype)
        except NonFiniteError as error:
            if self.on_nonfinite == "fail":
                raise NonFiniteError(
                    f"{_name(sample)}: {error}. --on-nonfinite skip leaves such samples out and names them"
                ) from error
            tokens = len(sample.token_ids)
            return self.store.skip(
                Entry(sample.index, "", 0, "", tokens, sampled, sample.id, skipped=f"nonfinite: {error}")
            )
        metadata = {
            **self.about,
            "post_norm": json.dumps([layer_id == NORM for layer_id in self.layer_ids]),
            "sampled_token": "" if sampled is None else str(sampled),
        }
        return self.store.commit(
            SampleData(sample.index, sample.id, sample.token_ids, sample.loss_mask, self.layer_ids, stacked, metadata),
            sampled,
        )


def check_states(sample: Sample, states: CapturedStates, layer_ids: tuple[LayerId, ...], hidden_size: int) -> None:
    """Check that the states are of this sample's tokens, of these layers, and of the right shapes.

    Raises:
        CaptureError: they are not.
    """
    if states.token_ids != sample.token_ids:
        pairs = zip(states.token_ids, sample.token_ids, strict=False)
        at = next(
            (i for i, (got, own) in enumerate(pairs) if got != own), min(len(states.token_ids), len(sample.token_ids))
        )
        raise CaptureError(
            f"{_name(sample)}: the states are of other tokens: {len(states.token_ids)} where the sample has "
            f"{len(sample.token_ids)}, different from position {at} on. Nothing of this run is trustworthy."
        )
    if states.layer_ids != layer_ids:
        raise CaptureError(f"{_name(sample)}: states of the layers {states.layer_ids} came, {layer_ids} were asked for")
    wanted = [(len(sample.token_ids), hidden_size)] * len(layer_ids)
    shapes = [tuple(getattr(tensor, "shape", ())) for tensor in states.hidden_states]
    if shapes != wanted:
        raise CaptureError(f"{_name(sample)}: the states have the shapes {shapes}, {wanted} were expected")


def _name(sample: Sample) -> str:
    return f"sample {sample.index} (line {sample.line})"
