"""The input: rows, checked as a whole before anything starts, then read again one by one.

A row has ``input_ids`` (integers, at least one), optionally ``loss_mask`` (0 or 1 for each of them); or ``messages``,
``conversations`` or ``text``, of which the model's own tokenizer makes tokens. ``id`` (text or an integer, unique in
the file) is optional. Other keys are ignored, blank lines skipped. Neither pass holds more than a row, or a batch of
columns; of the ids the check holds 8 bytes each, and 20 of each sample where it looks for duplicates.
"""

from __future__ import annotations

from vllm_compat.extract.inputs.check import check_input
from vllm_compat.extract.inputs.duplicates import Duplicates, Originals
from vllm_compat.extract.inputs.problems import MAX_KEPT_PROBLEMS
from vllm_compat.extract.inputs.read import read_samples
from vllm_compat.extract.inputs.sample import CheckedInput, InputChangedError, Sample
from vllm_compat.extract.inputs.source import Stamp, stamp_of
from vllm_compat.extract.inputs.tokenizer import TokenizerSource

__all__ = [
    "MAX_KEPT_PROBLEMS",
    "CheckedInput",
    "Duplicates",
    "InputChangedError",
    "Originals",
    "Sample",
    "Stamp",
    "TokenizerSource",
    "check_input",
    "read_samples",
    "stamp_of",
]
