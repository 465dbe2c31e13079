"""Which rank captures which request: every rank must give the same answer, and all get their share."""

from __future__ import annotations

import random

import pytest

from vllm_compat._capture.division import Division


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_each_request_is_one_rank_s_and_all_have_about_as_much(ranks: int) -> None:
    rng = random.Random(ranks)
    divisions = [Division(rank, ranks) for rank in range(ranks)]
    tokens = [0] * ranks
    for number in range(400):
        length = rng.randint(1, 2048)
        (owner,) = [rank for rank, division in enumerate(divisions) if division.is_ours(str(number), length)]
        tokens[owner] += length
        assert [division.is_others(str(number)) for division in divisions] == [n != owner for n in range(ranks)]
        if rng.random() < 0.5:  # ends, everywhere
            for division in divisions:
                division.forget(str(number))
                assert not division.is_others(str(number))
    assert max(tokens) - min(tokens) <= 2048


def test_requests_of_unknown_length_go_round() -> None:
    divisions = [Division(rank, 3) for rank in range(3)]
    owners = [[d.is_ours(str(n), 0) for d in divisions].index(True) for n in range(6)]
    assert owners == [0, 1, 2, 0, 1, 2]
