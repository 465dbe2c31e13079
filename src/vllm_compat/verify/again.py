"""Samples that are computed again: which, and what comes of it."""

from __future__ import annotations

import random
from collections.abc import Sequence

from vllm_compat.formats import SampleFileError
from vllm_compat.types import Tensor
from vllm_compat.verify.compare import FLOAT32_BOUND, Recomputed, Taken, compare
from vllm_compat.verify.config import VerifyConfig
from vllm_compat.verify.finite import dtype_name
from vllm_compat.verify.lines import Lines
from vllm_compat.verify.reference import NoReferenceError, Reference, load_reference
from vllm_compat.verify.run import RunFacts

__all__ = ["choose_samples", "compute_again"]


def choose_samples(lines: Lines, count: int, seed: int) -> list[int]:
    """So many samples that have a file, at random, in order; all where there are no more."""
    generator = random.Random(seed)
    chosen: list[int] = []
    for seen, index in enumerate(index for index, entry in lines if entry and not entry.skipped):
        if seen < count:
            chosen.append(index)
        elif (place := generator.randrange(seen + 1)) < count:
            chosen[place] = index
    return sorted(chosen)


def compute_again(run: RunFacts, lines: Lines, chosen: Sequence[int], config: VerifyConfig, model: str) -> Recomputed:
    """Compute samples again whose files are whole.

    Raises:
        NoReferenceError: it cannot be done; why.
    """
    if not chosen:
        raise NoReferenceError("there is no sample with which nothing is wrong")
    samples, metadata = _read(run, lines, chosen)
    exact = run.dtype in ("float32", "float") and dtype_name(samples[0].states) == "float32"
    bound = config.bound or (FLOAT32_BOUND if exact else None)

    def load(dtype: str) -> Reference:
        return load_reference(model, dtype, device=config.device, trust_remote_code=config.trust_remote_code)

    return compare(run.layer_ids, samples, load, bound=bound, stored=_in_float8 if "quantized" in metadata else _as_is)


def _read(run: RunFacts, lines: Lines, indices: Sequence[int]) -> tuple[list[Taken], dict[str, str]]:
    samples, metadata = [], dict[str, str]()
    for index, entry in lines.entries(indices):
        try:
            found = run.format.decode(run.folder / entry.file, index)
        except SampleFileError as error:
            raise NoReferenceError(f"sample {index} was changed while it was read: {error}") from error
        samples.append(Taken(index, found.token_ids, found.hidden_states))
        metadata = dict(found.metadata)
    return samples, metadata


def _as_is(states: Tensor) -> Tensor:
    return states


def _in_float8(states: Tensor) -> Tensor:
    from vllm_compat.formats.speculators_fp8 import dequantize, quantize

    return dequantize(*quantize(states))
