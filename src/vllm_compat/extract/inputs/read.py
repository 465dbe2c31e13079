"""The second pass over an input, row by row while the engine works."""

from __future__ import annotations

from collections.abc import Callable, Generator
from itertools import islice

from vllm_compat.extract.inputs.reader import RowReader
from vllm_compat.extract.inputs.sample import CheckedInput, InputChangedError, Sample
from vllm_compat.extract.inputs.source import SourceError, open_source
from vllm_compat.extract.rows import Row

__all__ = ["read_samples"]


def read_samples(
    checked: CheckedInput, wanted: Callable[[int], bool] = lambda _: True
) -> Generator[Sample, None, None]:
    """The samples of a checked input, in its order, one held at a time.

    Args:
        checked: the input.
        wanted: whether a sample of that index is to be read; the rows of others are passed by, and not parsed.

    Raises:
        InputChangedError: the input is not the one that was checked.
        UsageError: a package that reading takes is not installed, or the tokenizer cannot be loaded.
    """
    changed = InputChangedError(str(checked.path))
    index, end = -1, checked.max_tokens
    try:
        source = open_source(checked.path)
        reader = RowReader(source, checked.vocab_size, checked.tokenizer)
        for index, (line, raw) in enumerate(islice(source.rows(), checked.num_samples)):
            if not wanted(index):
                continue
            row = reader.read(line, raw)
            if source.stamp() != checked.stamp or not isinstance(row, Row):
                raise changed
            count = len(row.token_ids)
            mask = None if row.loss_mask is None else row.loss_mask[:end]
            left_out = count if count > end and checked.overlong != "truncate" else 0
            yield Sample(index, line, row.id, row.token_ids[:end], mask, count > end, left_out)
    except (OSError, SourceError) as error:
        raise changed from error
    if index + 1 != checked.num_samples:
        raise changed
