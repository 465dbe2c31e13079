"""One safetensors file for each sample, written only when its states are those of the sample."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from vllm_compat.errors import CaptureError
from vllm_compat.extract.config import SaveDtype
from vllm_compat.extract.files import safetensors_parts, write_whole
from vllm_compat.extract.inputs import Sample
from vllm_compat.extract.tensors import int64_blob, states_blob
from vllm_compat.types import CapturedStates, LayerId

__all__ = ["CONVENTION", "SAMPLE_FILES", "SampleWriter", "check_states"]

CONVENTION = "k = residual stream leaving decoder layer k, 0-based, before the final norm; norm = after it"
SAMPLE_FILES = "hs_*.safetensors"


@dataclass(frozen=True, slots=True)
class SampleWriter:
    """Writes ``hs_{index}.safetensors``: ``hidden_states``, ``token_ids`` and, where the row had one, ``loss_mask``.

    Attributes:
        folder: where the files go.
        layer_ids: what was captured, in the order of the file's second dimension.
        hidden_size: width of a state.
        save_dtype: dtype of ``hidden_states``.
        about: metadata that every file gets.
    """

    folder: Path
    layer_ids: tuple[LayerId, ...]
    hidden_size: int
    save_dtype: SaveDtype
    about: dict[str, str]

    def write(self, sample: Sample, states: CapturedStates) -> int:
        """Check the states and write the sample's file; returns its size in bytes.

        Raises:
            CaptureError: the states are not the sample's, or not finite; or the file is already there.
            VllmCompatError: the file cannot be written.
        """
        check_states(sample, states, self.layer_ids, self.hidden_size)
        path = self.folder / f"hs_{sample.index}.safetensors"
        if path.exists():
            raise CaptureError(
                f"{path} is already there, and not from this run: does another run write into this folder?"
            )
        blobs = {"token_ids": int64_blob(sample.token_ids)}
        if sample.loss_mask is not None:
            blobs["loss_mask"] = int64_blob(sample.loss_mask)
        try:
            blobs["hidden_states"] = states_blob(states.hidden_states, self.layer_ids, self.save_dtype)
        except CaptureError as error:
            raise CaptureError(f"{_name(sample)}: {error}") from error
        metadata = self.about | {
            "layer_ids": json.dumps(self.layer_ids),
            "layer_id_convention": CONVENTION,
            "index": str(sample.index),
            "request_id": states.request_id,
        }
        if sample.id is not None:
            metadata["sample_id"] = sample.id
        return write_whole(path, safetensors_parts(blobs, metadata))


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
