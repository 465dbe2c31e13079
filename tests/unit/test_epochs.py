"""Epochs: which requests may share cached blocks, and when the rows of those that have ended can go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_compat._engine.epochs import Epochs


def test_requests_of_one_epoch_have_one_salt_until_it_is_full() -> None:
    epochs = Epochs(100)
    first = epochs.salt("a", 60)
    assert epochs.salt("b", 40) == first
    second = epochs.salt("c", 1)
    assert second != first
    assert epochs.salt("d", 1000) not in (first, second), "one of its own"
    assert epochs.salt("e", 1) not in (first, second)


def test_the_rows_of_an_epoch_go_when_the_last_of_it_has_ended_and_another_has_begun() -> None:
    epochs = Epochs(10)
    epochs.salt("a", 6)
    epochs.salt("b", 4)
    epochs.end("a")
    epochs.end("b")
    assert epochs.retired() == [], "others may still come"
    epochs.salt("c", 3)
    assert epochs.retired() == ["a", "b"]
    assert epochs.retired() == []


def test_a_later_epoch_waits_for_an_earlier_one() -> None:
    """An id may be in both: the oldest of an id is the one that is forgotten."""
    epochs = Epochs(10)
    epochs.salt("long", 10)
    epochs.salt("a", 10)
    epochs.end("a")
    epochs.salt("b", 10)
    assert epochs.retired() == []
    epochs.end("long")
    assert epochs.retired() == ["long", "a"]


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 5)), max_size=60))
def test_every_request_is_retired_once_and_never_before_its_salt_is_out_of_use(steps: list[tuple[int, int]]) -> None:
    epochs, under_way, salts, retired = Epochs(50), [], {}, []
    for number, (tokens, ends) in enumerate(steps):
        salts[str(number)] = epochs.salt(str(number), tokens)
        under_way.append(str(number))
        for _ in range(min(ends, len(under_way))):
            epochs.end(under_way.pop(0))
        retired += epochs.retired()
        in_use = {salts[i] for i in under_way} | {salts[str(number)]}
        assert not in_use & {salts[i] for i in retired}
    assert len(retired) == len(set(retired))
