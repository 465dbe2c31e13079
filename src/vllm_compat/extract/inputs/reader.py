"""From a source's row to tokens, a loss mask and an id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_compat.extract.inputs.chat import ChatError, Tokenizer, load_tokenizer
from vllm_compat.extract.inputs.messages import messages_of
from vllm_compat.extract.inputs.source import Source
from vllm_compat.extract.inputs.tokenizer import TokenizerSource
from vllm_compat.extract.rows import KINDS, Row, check_ids, name_of, row_id, row_of

__all__ = ["RowReader"]


class RowReader:
    """Reads rows of one kind: that of the first one.

    Attributes:
        kind: one of ``KINDS``; ``input_ids`` while there was no row.
    """

    def __init__(self, source: Source, vocab_size: int | None, tokenizer: TokenizerSource | None) -> None:
        """Read rows of a source.

        Args:
            source: where they come from.
            vocab_size: token ids must be below it; None when it is not known.
            tokenizer: for rows without tokens; loaded when the first of them comes.
        """
        self.kind = KINDS[0]
        self._first_line = 0
        self._source = source
        self._vocab_size = vocab_size
        self._tokenizer_source = tokenizer
        self._tokenizer: Tokenizer | None = None

    def read(self, line: int, raw: Any) -> Row | list[str]:
        """The row, or everything that is wrong with it.

        Raises:
            UsageError: the tokenizer cannot be loaded, or has no chat template.
        """
        fields = self._source.fields(raw)
        if isinstance(fields, list):
            return fields
        kinds = KINDS[:1] if KINDS[0] in fields else tuple(kind for kind in KINDS if kind in fields)
        if len(kinds) > 1:
            return [f"it has {' and '.join(kinds)}, and one of them is wanted"]
        problems: list[str] = []
        if kinds and not self._first_line:
            self.kind, self._first_line = kinds[0], line
        elif kinds and kinds[0] != self.kind:
            problems.append(
                f"it has {kinds[0]}, and line {self._first_line} has {self.kind}: a file has rows of one kind"
            )
        row = self._tokenized(kinds[0], fields) if kinds and kinds != KINDS[:1] else row_of(fields, self._vocab_size)
        return [*problems, *(row if isinstance(row, list) else ())] if problems else row

    def _tokenized(self, kind: str, fields: dict[str, Any]) -> Row | list[str]:
        problems: list[str] = []
        own_id = row_id(fields, problems)
        if "loss_mask" in fields:
            problems.append(f"loss_mask goes with input_ids, not with {kind}")
        text, tools = fields[kind], _tools(fields, problems)
        messages = messages_of(kind, text, problems) if kind != "text" else []
        if kind == "text" and type(text) is not str:
            problems.append(f"text is {name_of(text)}, not text")
        if self._tokenizer_source is None:
            problems.append(f"{kind} must be made into tokens, and no tokenizer is known")
        if problems or self._tokenizer_source is None:
            return problems
        self._tokenizer = self._tokenizer or load_tokenizer(self._tokenizer_source)
        mask: Sequence[int] | None = None
        try:
            if kind == "text":
                ids = self._tokenizer.encode_text(text)
            else:
                ids, mask = self._tokenizer.encode_chat(messages, tools)
        except ChatError as error:
            return [str(error)]
        if not ids:
            return [f"{kind} has no tokens"]
        check_ids("token", ids, self._vocab_size, problems)
        return problems or Row(own_id, tuple(ids), None if mask is None else tuple(mask), kind)


def _tools(fields: dict[str, Any], problems: list[str]) -> list[Any] | None:
    """What the chat template is told of tools; nothing for an empty list."""
    tools = fields.get("tools")
    if tools is not None and not isinstance(tools, list):
        problems.append(f"tools is {name_of(tools)}, not a list")
        return None
    return tools or None
