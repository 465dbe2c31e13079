"""A report as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["as_text"]


def as_text(report: dict[str, Any]) -> str:
    """What the JSON says, a line for each fact."""
    return "\n".join(line for name, value in report.items() for line in _lines(name, value))


def _lines(name: str, value: Any) -> Iterator[str]:
    if name == "verdicts":
        yield name
        for v in value:
            yield f"  {v['variation']:<9}{v['name']:<17}{'fits' if v['fits'] else 'NO  '}  {_short(v)}"
    elif isinstance(value, dict):
        width = max(map(len, value), default=0)
        yield from [name] if value else []
        yield from (f"  {key:<{width}}  {_inline(v)}" for key, v in value.items())
    elif isinstance(value, list):
        yield from (f"{name:<14}{text}" for text in value)
    else:
        yield f"{name:<14}{value}"


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['text']}  [{value['evidence']}]"
    return ", ".join(value) if isinstance(value, list) else str(value)


def _short(verdict: dict[str, Any]) -> str:
    """The reason with the symbols that were found counted, not listed: nobody reads fifteen of them."""
    reason = str(verdict["reason"])
    return reason if not verdict["fits"] else f"{reason.count(':')} symbol(s) found"
