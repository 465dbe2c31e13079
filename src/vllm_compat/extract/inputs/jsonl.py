"""JSONL: one JSON object a line, with or without a BOM, with either end of line, plain or compressed."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from vllm_compat.extract.inputs.compressed import open_bytes
from vllm_compat.extract.inputs.source import Source
from vllm_compat.extract.rows import parse_line

__all__ = ["JsonLines"]

_BOM = b"\xef\xbb\xbf"


class JsonLines(Source):
    """Lines that are not blank, with their number from 1; no BOM, no line end."""

    has_lines = True

    def rows(self) -> Generator[tuple[int, bytes], None, None]:
        with open_bytes(self.path) as file:
            for number, raw in enumerate(file, start=1):
                text = (raw.removeprefix(_BOM) if number == 1 else raw).strip(b" \t\r\n")
                if text:
                    yield number, text

    def fields(self, raw: bytes) -> dict[str, Any] | list[str]:
        return parse_line(raw)
