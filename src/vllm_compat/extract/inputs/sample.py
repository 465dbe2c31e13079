"""What the input is made of: samples, and a file that was checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from vllm_compat.errors import InputError, InputProblem
from vllm_compat.extract.config import Overlong
from vllm_compat.extract.inputs.duplicates import Duplicates
from vllm_compat.extract.inputs.source import Stamp
from vllm_compat.extract.inputs.tokenizer import TokenizerSource

__all__ = ["CheckedInput", "InputChangedError", "Sample"]


class InputChangedError(InputError):
    """The input file is no longer the one that was checked. Files written before are whole and their own."""

    def __init__(self, path: str) -> None:
        problem = "the file changed after it was checked; leave it alone while a run reads it, and start again"
        super().__init__(path, [InputProblem(0, problem)])
        self.args = (f"{path}: {problem}",)


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample.

    Attributes:
        index: its number among the samples, from 0; blank lines do not count.
        line: its line in the file, or its row, from 1; blank lines count.
        id: the row's own id, as text; None when it has none.
        token_ids: what is left of its tokens, from the start.
        loss_mask: 0 or 1 for each of them; None when the row has none.
        truncated: whether tokens were cut off.
        overlong: how many tokens the row has, where that is more than may be and the sample is to be left out; else 0.
    """

    index: int
    line: int
    id: str | None
    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...] | None
    truncated: bool
    overlong: int = 0


@dataclass(frozen=True, slots=True)
class CheckedInput:
    """An input without problems.

    Attributes:
        path: the file, or the folder.
        stamp: size, mtime and inode when it was checked.
        max_tokens: where samples are cut.
        vocab_size: what token ids were checked against, if anything.
        num_samples: samples to read.
        num_tokens: their tokens after the cut, without those of samples that are left out.
        num_truncated: samples that lose tokens by it.
        longest: tokens of the longest sample after the cut.
        highest: the highest token id, before the cut, and the line it is on.
        xxh3: digest of the samples' lines, or of their tokens, masks and ids where these are not in the lines.
        kind: what the rows have: ``input_ids``, ``messages``, ``conversations`` or ``text``.
        overlong: what becomes of samples of more than ``max_tokens`` tokens.
        num_left_out: samples that are left out for it.
        num_without_loss: samples whose loss mask has no 1, or none left after the cut.
        num_duplicates: samples whose tokens an earlier one has after the cut.
        tokenizer: what made tokens of the rows; None for ``input_ids``.
        duplicates: which samples have the same tokens; None when there are none, or nobody looked.
    """

    path: Path
    stamp: Stamp
    max_tokens: int
    vocab_size: int | None
    num_samples: int
    num_tokens: int
    num_truncated: int
    longest: int
    highest: tuple[int, int]
    xxh3: str
    kind: str = "input_ids"
    overlong: Overlong = "truncate"
    num_left_out: int = 0
    num_without_loss: int = 0
    num_duplicates: int = 0
    tokenizer: TokenizerSource | None = None
    duplicates: Duplicates | None = field(default=None, compare=False, repr=False)
