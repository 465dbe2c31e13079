"""The first pass over an input: everything that is wrong with it, before anything slow starts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from vllm_compat.errors import InputError, InputProblem
from vllm_compat.extract.checksum import new_hash
from vllm_compat.extract.config import Overlong
from vllm_compat.extract.ids import Ids
from vllm_compat.extract.inputs.duplicates import DuplicateFinder, packed_ids
from vllm_compat.extract.inputs.problems import InputProblems
from vllm_compat.extract.inputs.reader import RowReader
from vllm_compat.extract.inputs.sample import CheckedInput
from vllm_compat.extract.inputs.source import Source, SourceError, open_source
from vllm_compat.extract.inputs.tokenizer import TokenizerSource
from vllm_compat.extract.rows import KINDS, Row

__all__ = ["check_input"]


def check_input(
    path: Path,
    *,
    max_tokens: int,
    vocab_size: int | None = None,
    num_samples: int | None = None,
    overlong: Overlong = "truncate",
    tokenizer: TokenizerSource | None = None,
    find_duplicates: bool = False,
) -> CheckedInput:
    """Read the input through and find everything that is wrong with it.

    Args:
        path: the file, or the folder.
        max_tokens: tokens that are kept of a sample.
        vocab_size: token ids must be below it; None when it is not known.
        num_samples: read the first so many samples at most.
        overlong: what becomes of a sample of more tokens.
        tokenizer: for rows without tokens; None to refuse them.
        find_duplicates: look for samples with the same tokens.

    Raises:
        InputError: with every problem, each with its line.
        UsageError: a package that reading takes is not installed, or the tokenizer cannot be loaded.
    """
    problems = InputProblems()
    try:
        source = open_source(path)
        stamp = source.stamp()
        reader = RowReader(source, vocab_size, tokenizer)
        seen = _Seen(max_tokens, overlong, problems, DuplicateFinder() if find_duplicates else None)
        try:
            for line, raw in islice(source.rows(), num_samples):
                seen.samples += 1
                if source.has_lines:
                    seen.lines.update(raw)
                    seen.lines.update(b"\n")
                row = reader.read(line, raw)
                if isinstance(row, Row):
                    seen.add(line, row, by_lines=source.has_lines)
                else:
                    for text in row:
                        problems.add(line, text)
        except SourceError as error:
            problems.add(0, str(error))
        if repeated := seen.ids.repeated():
            _name_repeated(_ids(source, num_samples), repeated, problems)
        if source.stamp() != stamp:
            problems.add(0, "the file changed while it was read")
    except SourceError as error:
        raise InputError(str(path), [InputProblem(0, str(error))]) from error
    except OSError as error:
        raise InputError(str(path), [InputProblem(0, f"cannot be read: {error.strerror or error}")]) from error
    if not seen.samples and not problems.count:
        problems.add(0, "there is no sample in the file")
    if problems.count:
        raise problems.error(path)
    by_lines = source.has_lines and reader.kind == KINDS[0]
    duplicates = seen.duplicates.found() if seen.duplicates else None
    return CheckedInput(
        path=path,
        stamp=stamp,
        max_tokens=max_tokens,
        vocab_size=vocab_size,
        num_samples=seen.samples,
        num_tokens=seen.tokens,
        num_truncated=seen.overlong if overlong == "truncate" else 0,
        longest=seen.longest,
        highest=seen.highest,
        xxh3=(seen.lines if by_lines else seen.contents).hexdigest(),
        kind=reader.kind,
        overlong=overlong,
        num_left_out=seen.overlong if overlong == "skip" else 0,
        num_without_loss=seen.without_loss,
        num_duplicates=len(duplicates) if duplicates else 0,
        tokenizer=None if reader.kind == KINDS[0] else tokenizer,
        duplicates=duplicates,
    )


class _Seen:
    """What was seen of the good rows."""

    def __init__(
        self, max_tokens: int, mode: Overlong, problems: InputProblems, duplicates: DuplicateFinder | None
    ) -> None:
        self.samples = self.tokens = self.overlong = self.longest = self.without_loss = 0
        self.highest = (-1, 0)
        self.ids = Ids()
        self.lines, self.contents = new_hash(), new_hash()
        self.duplicates = duplicates
        self._max_tokens = max_tokens
        self._mode = mode
        self._problems = problems

    def add(self, line: int, row: Row, *, by_lines: bool) -> None:
        if not (by_lines and row.kind == KINDS[0]):
            self.contents.update(_contents(row))
        if row.id is not None:
            self.ids.add(row.id)
        self.highest = max(self.highest, (max(row.token_ids), line), key=lambda found: found[0])
        count, end = len(row.token_ids), self._max_tokens
        self.overlong += count > end
        if count > end and self._mode == "fail":
            self._problems.add(
                line,
                f"{count} tokens, and the limit is {end}; --overlong truncate cuts such samples, and --overlong skip "
                "leaves them out",
            )
        if count > end and self._mode != "truncate":
            return
        self.tokens += min(count, end)
        self.longest = max(self.longest, min(count, end))
        self.without_loss += row.loss_mask is not None and 1 not in row.loss_mask[:end]
        if self.duplicates:
            self.duplicates.add(self.samples - 1, row.token_ids[:end])


def _contents(row: Row) -> bytes:
    """What a sample is, as bytes: other bytes for other samples."""
    mask = b"" if row.loss_mask is None else bytes(row.loss_mask)
    head = json.dumps([len(row.token_ids), row.loss_mask is None, row.id])
    return head.encode() + b"\n" + packed_ids(row.token_ids) + mask


def _ids(source: Source, num_samples: int | None) -> Iterator[tuple[int, str]]:
    """The ids of the rows that have a good one, whatever else is wrong with them."""
    for line, raw in islice(source.rows(), num_samples):
        fields = source.fields(raw)
        if isinstance(fields, dict) and type(own_id := fields.get("id")) in (str, int):
            yield line, str(own_id)


def _name_repeated(ids: Iterator[tuple[int, str]], repeated: set[int], problems: InputProblems) -> None:
    first: dict[str, int] = {}
    for line, own_id in ids:
        if hash(own_id) in repeated:
            if own_id in first:
                problems.add(line, f"the id {own_id!r} is also on line {first[own_id]}")
            else:
                first[own_id] = line
