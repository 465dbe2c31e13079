"""The rows of one request: pieces, gaps, rows forwarded again, and whose memory it is."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_compat._capture.kept import KeptRows
from vllm_compat._capture.memory import Memory
from vllm_compat._capture.slots import OneByOne, Slots

torch: Any = pytest.importorskip("torch")


def piece(start: int, count: int, of: int = 0) -> list[Any]:
    """Rows ``start`` to ``start + count`` of a request; ``of`` marks them."""
    positions = torch.arange(start, start + count)
    return [positions + of, torch.stack([positions * 1.0 + of, positions * 10.0 + of], dim=1)[:, :, None]]


def put(rows: KeptRows, start: int, count: int, of: int = 0) -> bool:
    if not rows.expect(start, count):
        return False
    rows.write(start, piece(start, count, of))
    return True


def joined(rows: KeptRows) -> list[list[float]]:
    ids, states = rows.joined().tensors
    return [ids.tolist(), *(states[:, layer, 0].tolist() for layer in range(2))]


def positions(*numbers: int) -> list[list[float]]:
    return [list(numbers), [n * 1.0 for n in numbers], [n * 10.0 for n in numbers]]


@pytest.mark.parametrize("num_tokens", [0, 3, 5, 9])
@pytest.mark.parametrize("counts", [[5], [2, 3], [1, 1, 1, 2], [4, 1], [3, 99, 1]])
def test_pieces_join_in_the_order_of_their_positions(counts: list[int], num_tokens: int) -> None:
    rows, start = KeptRows(num_tokens), 0
    for count in counts:
        assert put(rows, start, count)
        start += count
        assert len(rows) == start
    assert joined(rows) == positions(*range(start))


@pytest.mark.parametrize("before", [0, 3])
def test_a_gap_is_refused_and_changes_nothing(before: int) -> None:
    rows = KeptRows()
    if before:
        put(rows, 0, before)
    assert not put(rows, before + 1, 2)
    assert len(rows) == before
    assert put(rows, before, 2)
    assert joined(rows) == positions(*range(before + 2))


AGAIN = pytest.mark.parametrize(
    ("start", "count"), [(0, 2), (0, 9), (1, 3), (2, 1), (3, 4), (4, 2), (5, 1), (6, 2)], ids=lambda n: str(n)
)


@AGAIN
def test_rows_forwarded_again_after_preemption_replace_the_old_from_there_on(start: int, count: int) -> None:
    rows = KeptRows()
    for old in ((0, 2), (2, 3), (5, 1)):
        put(rows, *old)
    assert put(rows, start, count, of=100)
    found = joined(rows)
    ids = [*range(start), *range(100 + start, 100 + start + count)]
    assert found[0] == ids
    assert found[1] == [float(i) for i in ids]
    assert len(rows) == len(ids) == start + count


@AGAIN
def test_it_makes_no_difference_that_rows_are_copied_in_later(start: int, count: int) -> None:
    rows = KeptRows(4)
    passes = [(0, 2, 0), (2, 3, 0), (5, 1, 0), (start, count, 100), (start + count, 1, 100)]
    for at, number, _ in passes:
        assert rows.expect(at, number)
    for at, number, of in passes:
        rows.write(at, piece(at, number, of))
    assert joined(rows)[0] == [*range(start), *range(100 + start, 100 + start + count + 1)]


@pytest.mark.parametrize("counts", [[5], [2, 3], [1, 1, 1, 1, 1]])
def test_a_prompt_of_known_length_is_copied_once(counts: list[int]) -> None:
    rows, start = KeptRows(5), 0
    for count in counts:
        put(rows, start, count)
        start += count
    (room,) = rows._rooms
    assert rows.joined() is room


@pytest.mark.parametrize("num_tokens", [0, 2, 7])
def test_rows_are_copies_in_ordinary_tensors_that_hold_nothing_else(num_tokens: int) -> None:
    rows = KeptRows(num_tokens)
    batch = torch.zeros(100, 2, 4)
    with torch.inference_mode():
        computed = batch + 1
        for start, ids in ((0, [1, 2]), (2, [3])):
            rows.expect(start, len(ids))
            rows.write(start, [torch.tensor(ids), computed[start : start + len(ids)]])
        computed[:] = 9
        found = rows.joined().tensors
    for held in (*rows._rooms[0].tensors, *found):
        assert not held.is_inference()
    ids, states = found
    assert ids.tolist() == [1, 2, 3]
    assert states.tolist() == [[[1] * 4] * 2] * 3
    assert states.untyped_storage().nbytes() == 3 * 2 * 4 * 4
    assert ids.untyped_storage().nbytes() == 3 * 8


# answers, whose rows come one by one


def pass_of(values: list[int]) -> list[Any]:
    """The tensors of a pass that has a row of each of these."""
    ids = torch.tensor(values)
    return [ids, torch.stack([ids * 1.0, ids * 10.0], dim=1)[:, :, None]]


@pytest.mark.parametrize("prompts", [[1], [3, 1, 200], [5] * 40])
@pytest.mark.parametrize("answers", [[1], [64, 65, 130], [200, 3]])
def test_answers_of_many_requests_are_copied_in_together(prompts: list[int], answers: list[int]) -> None:
    """Each ends when it does, and another takes its slot; now and then one starts over from further back."""
    memory = Memory()
    slots = Slots(memory)
    lengths = [(prompt, answers[n % len(answers)]) for n, prompt in enumerate(prompts * 3)]
    running: dict[int, KeptRows] = {}
    position: dict[int, int] = {}
    wanted: dict[int, list[int]] = {}
    waiting = list(enumerate(lengths))
    value = 0
    for step in range(1000):
        while waiting and len(running) < 20:
            n, (prompt, answer) = waiting.pop(0)
            running[n] = KeptRows(prompt, memory, slots)
            put(running[n], 0, prompt, of=1000 * n)
            position[n], wanted[n] = prompt, [1000 * n + i for i in range(prompt)]
            lengths[n] = (prompt, prompt + answer)
        if not running:
            break
        order = sorted(running, reverse=bool(step % 2))
        if step % 150 == 149:  # the first was preempted, and comes back some rows earlier
            n = order[0]
            position[n] = max(position[n] - 70, 0)
            del wanted[n][position[n] :]
        values = [value + i for i in range(len(order))]
        value += len(order)
        tensors, later = pass_of(values), OneByOne()
        for row, n in enumerate(order):
            rows = running[n]
            assert rows.expect(position[n], 1)
            if not rows.write_later(position[n], row, tensors, later):
                rows.write(position[n], [tensor[row : row + 1] for tensor in tensors])
            position[n] += 1
            wanted[n].append(values[row])
        later.copy(tensors)
        for tensor in tensors:
            tensor.fill_(-1)  # they are good until the next pass
        for n in order:
            if position[n] >= lengths[n][1]:
                found = running.pop(n).joined().tensors
                assert found[0].tolist() == wanted[n]
                assert found[1][:, 0, 0].tolist() == [float(i) for i in wanted[n]]
    assert not running
    assert not waiting
    assert len(slots._slabs) <= 20 * 4 // 16 + 2, "slots are used again"


def test_a_slab_that_nobody_uses_is_let_go_but_for_one() -> None:
    slots = Slots(Memory())
    like = piece(0, 1)
    held = [slots.slot(like) for _ in range(50)]
    assert len(slots._slabs) == 4
    held.clear()
    held.append(slots.slot(like))
    assert len(slots._slabs) == 1
