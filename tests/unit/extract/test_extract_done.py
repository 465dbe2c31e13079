"""What is done: lines and files together, in memory that does not grow with them."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import pytest

from vllm_compat.errors import StorageError
from vllm_compat.extract.done import Done, SealedEntries, read_done
from vllm_compat.extract.ids import Ids
from vllm_compat.extract.journal import Entry, encode_entry


def entry(index: int, size: int = 3, again: int = 0, tokens: int = 5) -> Entry:
    return Entry(index, f"hs_{index}.safetensors", size, "0" * 16, tokens, 1, None, again)


def skipped(index: int, again: int = 0) -> Entry:
    return Entry(index, "", 0, "", 5, 1, None, again, "nonfinite: layer id 2")


def write(folder: Path, name: str, entries: Iterable[Entry]) -> None:
    (folder / name).write_bytes(b"".join(map(encode_entry, entries)))


def test_a_line_and_a_file_of_its_size_make_it_done(tmp_path: Path) -> None:
    (tmp_path / "hs_0.safetensors").write_bytes(b"abc")
    (tmp_path / "hs_1.safetensors").write_bytes(b"ab")
    (tmp_path / "hs_3.safetensors").write_bytes(b"abc")
    write(tmp_path, "journal-0-of-2.jsonl", [entry(0), entry(2)])
    write(tmp_path, "journal-1-of-2.jsonl", [entry(1), skipped(5)])
    done, ends = read_done(tmp_path, 6)
    assert [done.owes(i) for i in range(6)] == [False, True, True, True, True, False]
    assert [done.is_hole(i) for i in range(6)] == [False, True, True, False, False, False]
    assert (len(done), done.num_skipped, done.tokens, done.bytes, done.complete) == (2, 1, 5, 3, False)
    assert done.skipped == {5: "nonfinite: layer id 2"}
    assert [done.owed((0, 2)), done.owed((1, 2)), done.owed((0, 1))] == [2, 2, 4]
    assert done.first_owed() == [1, 2, 3, 4]
    assert ends == {path: path.stat().st_size for path in tmp_path.glob("journal-*")}
    entries = list(SealedEntries(tmp_path, 6))
    assert [e.index for e in entries] == [0, 1, 2, 5]


@pytest.mark.parametrize(
    ("lines", "sizes", "state"),
    [
        ([entry(0), entry(0, again=1)], [3, 3], (True, 5, 3, 2)),
        ([entry(0, again=1), entry(0)], [3, 3], (True, 5, 3, 2)),
        ([entry(0), entry(0, size=4, again=1)], [3, 3], (False, 0, 0, 2)),
        ([entry(0, size=4, again=7), entry(0, size=3, again=1)], [4, 4], (True, 5, 4, 8)),
        ([entry(0), entry(0)], [None, None], (False, 0, 0, 1)),
        ([entry(0), skipped(0, again=2)], [None, None], (True, 0, 0, 3)),
    ],
)
def test_of_two_lines_the_one_that_was_made_again_counts(
    lines: list[Entry], sizes: list[int | None], state: tuple[bool, int, int, int]
) -> None:
    done = Done(1)
    for line, size in zip(lines, sizes, strict=True):
        done.add(line, size)
    assert (done.complete, done.tokens, done.bytes, done.again) == state


def test_a_file_that_cannot_be_looked_at_is_no_hole(tmp_path: Path) -> None:
    """A file system that fails must not look like one that has lost everything."""
    write(tmp_path, "journal-0-of-1.jsonl", [Entry(0, "loop/x.pt", 3, "0" * 16, 5, 1)])
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(StorageError, match=r"loop/x\.pt cannot be read"):
        read_done(tmp_path, 1)


def test_memory_does_not_grow_with_what_is_done(tmp_path: Path) -> None:
    """A byte a sample to go on, and nine to seal; a line has a hundred."""
    count = 20_000
    write(tmp_path, "journal-0-of-1.jsonl", map(entry, range(count)))
    tracemalloc.start()
    try:
        done, _ = read_done(tmp_path, count)
        highest = tracemalloc.get_traced_memory()[1]
        assert highest < 500_000 + count, "some hundred lines, and a byte a sample"
        gc.collect()  # the interpreter keeps a few hundred tuples to use again
        assert tracemalloc.get_traced_memory()[0] < 20_000 + count
        tracemalloc.reset_peak()
        assert sum(1 for _ in SealedEntries(tmp_path, count)) == count
        assert tracemalloc.get_traced_memory()[1] < 500_000 + 12 * count
    finally:
        tracemalloc.stop()
    assert done.owed((0, 1)) == count


def test_ids_take_eight_bytes_each() -> None:
    tracemalloc.start()
    try:
        ids = Ids()
        for number in range(40_000):
            ids.add(f"a rather long id, number {number}")
        assert tracemalloc.get_traced_memory()[0] < 40_000 * 10 + 60_000
        assert not ids.repeated()
        assert tracemalloc.get_traced_memory()[1] < 40_000 * 10 + 200_000
    finally:
        tracemalloc.stop()
    for number in (7, 39_999, 7):
        ids.add(f"a rather long id, number {number}")
    assert ids.repeated() == {hash(f"a rather long id, number {number}") for number in (7, 39_999)}
