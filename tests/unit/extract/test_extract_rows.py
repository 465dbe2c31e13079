"""One row: strict JSON, strict types, and words that say what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_compat.extract.rows import Row, parse_row


def problems(raw: bytes, vocab_size: int | None = 100) -> list[str]:
    found = parse_row(raw, vocab_size)
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"input_ids": [5]}, Row(None, (5,), None)),
        ({"input_ids": [0, 99], "loss_mask": [0, 1]}, Row(None, (0, 99), (0, 1))),
        ({"input_ids": [1, 2], "loss_mask": [False, True]}, Row(None, (1, 2), (0, 1))),
        ({"input_ids": [1], "id": 7}, Row("7", (1,), None)),
        ({"input_ids": [1], "id": "é", "text": {"input_ids": None}}, Row("é", (1,), None)),
    ],
)
def test_valid_row(row: dict[str, Any], expected: Row) -> None:
    found = parse_row(json.dumps(row).encode(), 100)
    assert found == expected
    assert isinstance(found, Row)
    assert {type(value) for value in found.loss_mask or ()} <= {int}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({}, "no input_ids"),
        ({"input_ids": None}, "input_ids is null, not a list"),
        ({"input_ids": "1 2"}, "input_ids is text, not a list"),
        ({"input_ids": []}, "input_ids is empty"),
        ({"input_ids": [1, True]}, r"input_ids[1] is true or false, not an integer"),
        ({"input_ids": [1, 2.0]}, r"input_ids[1] is a float, not an integer"),
        ({"input_ids": [[1, 2]]}, r"input_ids[0] is a list, not an integer"),
        ({"input_ids": [1, 2, -100]}, r"input_ids[2] is -100, below 0"),
        ({"input_ids": [99, 100]}, r"input_ids[1] is 100; the model's vocabulary has 100 ids"),
        ({"input_ids": [1], "loss_mask": None}, "loss_mask is null"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "loss_mask has 1 entries, input_ids has 2"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, r"loss_mask[1] is 2, not 0 or 1"),
        ({"input_ids": [1, 2], "loss_mask": [1, 1.0]}, r"loss_mask[1] is 1.0, not 0 or 1"),
        ({"input_ids": [1, 2], "loss_mask": ["1", 1]}, r"loss_mask[0] is text, not 0 or 1"),
        ({"input_ids": [1], "id": None}, "id is null"),
        ({"input_ids": [1], "id": True}, "id is true or false"),
        ({"input_ids": [1], "id": 1.5}, "id is a float"),
        ({"input_ids": [1], "id": "\ud800"}, "surrogate"),
        ([1, 2], "a list, not an object"),
        (None, "null, not an object"),
    ],
)
def test_wrong_types(row: Any, words: str) -> None:
    [problem] = problems(json.dumps(row).encode())
    assert words in problem


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b'{"input_ids": [1, 2', "not strict JSON"),
        (b'{"input_ids": [1]} {"input_ids": [2]}', "not strict JSON"),
        (b'{"input_ids": [1], "score": NaN}', "NaN is no JSON number"),
        (b'{"input_ids": [1], "score": -Infinity}', "-Infinity is no JSON number"),
        (b'{"input_ids": [1], "input_ids": [2]}', "the key 'input_ids' is there twice"),
        (b'{"input_ids": [1], "id": "\xff"}', "not UTF-8: byte 26 of the line is 0xff"),
        (b'{"input_ids": [' + b"9" * 5000 + b"]}", "not strict JSON"),
        (b"[" * 200_000, "not strict JSON"),
    ],
)
def test_not_json(raw: bytes, words: str) -> None:
    [problem] = problems(raw)
    assert words in problem


def test_every_problem_of_a_row_is_told() -> None:
    assert len(problems(b'{"input_ids": [-1], "loss_mask": [5], "id": null}')) == 3


def test_without_a_vocabulary_any_id_will_do() -> None:
    assert parse_row(b'{"input_ids": [123456789]}', None) == Row(None, (123456789,), None)
