"""One row of the input: strict JSON, strict types."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

__all__ = ["COLUMNS", "KINDS", "Row", "check_ids", "name_of", "parse_line", "parse_row", "row_id", "row_of"]

KINDS = ("input_ids", "messages", "conversations", "text")
"""The keys that say what a row is."""
COLUMNS = frozenset({*KINDS, "loss_mask", "id", "tools"})
"""The keys that mean something; others are passed by."""

_NAMES: dict[Any, str] = {
    dict: "an object",
    list: "a list",
    str: "text",
    bool: "true or false",
    int: "an integer",
    float: "a float",
    type(None): "null",
}


@dataclass(frozen=True, slots=True)
class Row:
    """A valid row.

    Attributes:
        id: the row's own id, as text; None when it has none.
        token_ids: at least one, each >= 0 and below the vocabulary's size where that is known.
        loss_mask: 0 or 1 for each token; None when the row has none.
        kind: what its tokens come from, one of ``KINDS``.
    """

    id: str | None
    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...] | None
    kind: str = "input_ids"


def parse_row(raw: bytes, vocab_size: int | None) -> Row | list[str]:
    """The row of one line that has ``input_ids``, or everything that is wrong with it."""
    fields = parse_line(raw)
    return fields if isinstance(fields, list) else row_of(fields, vocab_size)


def parse_line(raw: bytes) -> dict[str, Any] | list[str]:
    """The object of one line, or what is wrong with it."""
    try:
        row = json.loads(raw.decode("utf-8"), object_pairs_hook=_once, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        return [f"not UTF-8: byte {error.start} of the line is 0x{raw[error.start]:02x}"]
    except (ValueError, RecursionError) as error:
        return [f"not strict JSON: {error}"]
    if not isinstance(row, dict):
        return [f"{name_of(row)}, not an object"]
    return cast("dict[str, Any]", row)


def row_of(fields: dict[str, Any], vocab_size: int | None) -> Row | list[str]:
    """The row of an object that has ``input_ids``, or everything that is wrong with it."""
    problems: list[str] = []
    token_ids = _token_ids(fields, vocab_size, problems)
    loss_mask = _loss_mask(fields, token_ids, problems)
    own_id = row_id(fields, problems)
    if problems:
        return problems
    return Row(own_id, tuple(token_ids), None if loss_mask is None else tuple(map(int, loss_mask)))


def row_id(fields: dict[str, Any], problems: list[str]) -> str | None:
    """The row's own id as text; what is wrong with it is added to the problems."""
    if "id" not in fields:
        return None
    value = fields["id"]
    if type(value) not in (str, int):
        problems.append(f"id is {name_of(value)}, not text or an integer")
        return None
    text = str(value)
    if any("\ud800" <= character <= "\udfff" for character in text):
        problems.append("id has half of a surrogate pair, which no UTF-8 file can hold")
    return text


def check_ids(name: str, ids: Sequence[int], vocab_size: int | None, problems: list[str]) -> None:
    """Integers must be token ids; the first that is none is added to the problems."""
    if min(ids) < 0:
        at = next(i for i, value in enumerate(ids) if value < 0)
        problems.append(f"{name}[{at}] is {ids[at]}, below 0")
    elif vocab_size is not None and max(ids) >= vocab_size:
        at = next(i for i, value in enumerate(ids) if value >= vocab_size)
        problems.append(f"{name}[{at}] is {ids[at]}; the model's vocabulary has {vocab_size} ids, from 0")


def name_of(value: Any) -> str:
    """What kind of a thing a value is, in a person's words."""
    return _NAMES.get(value.__class__, f"of type {type(value).__name__}")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} is there twice")
    return found


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON number")


def _token_ids(fields: dict[str, Any], vocab_size: int | None, problems: list[str]) -> list[int]:
    if "input_ids" not in fields:
        problems.append(f"no {', '.join(KINDS[:-1])} or {KINDS[-1]}")
        return []
    ids = fields["input_ids"]
    if not _is_list(ids):
        problems.append(f"input_ids is {name_of(ids)}, not a list of integers")
        return []
    if not ids:
        problems.append("input_ids is empty")
    elif set(map(type, ids)) != {int}:
        at = next(i for i, value in enumerate(ids) if type(value) is not int)
        problems.append(f"input_ids[{at}] is {name_of(ids[at])}, not an integer")
    else:
        check_ids("input_ids", ids, vocab_size, problems)
    return ids


def _loss_mask(fields: dict[str, Any], token_ids: list[int], problems: list[str]) -> list[int] | None:
    if "loss_mask" not in fields:
        return None
    mask = fields["loss_mask"]
    if not _is_list(mask):
        problems.append(f"loss_mask is {name_of(mask)}, not a list of 0 and 1")
        return None
    if not set(map(type, mask)) <= {int, bool} or not set(mask) <= {0, 1}:
        wrong = next(i for i, value in enumerate(mask) if type(value) not in (int, bool) or value not in (0, 1))
        shown = mask[wrong] if type(mask[wrong]) in (int, float) else name_of(mask[wrong])
        problems.append(f"loss_mask[{wrong}] is {shown}, not 0 or 1")
    if token_ids and len(mask) != len(token_ids):
        problems.append(f"loss_mask has {len(mask)} entries, input_ids has {len(token_ids)}")
    return mask


def _is_list(value: Any) -> TypeGuard[list[Any]]:
    return isinstance(value, list)
