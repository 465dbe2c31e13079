"""Any entries are read back; whatever is cut off or changed, no wrong entry is ever read."""

from __future__ import annotations

import contextlib
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_compat.errors import JournalError
from vllm_compat.extract.journal import Entry, Told, encode_entry, entry_at, parse_journal

PATH = Path("journal-0-of-1.jsonl")
SAMPLES = 1000


@st.composite
def an_entry(draw: st.DrawFn) -> Entry:
    index, again = draw(st.integers(0, SAMPLES - 1)), draw(st.sampled_from([0, 0, 1, 300]))
    tokens, sampled = draw(st.integers(0, 2**40)), draw(st.none() | st.integers(0, 2**20))
    row_id = draw(st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=6))
    if draw(st.booleans()):
        why = draw(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8))
        return Entry(index, "", 0, "", tokens, sampled, row_id, again, why)
    digest = draw(st.text("0123456789abcdef", min_size=16, max_size=16))
    file = draw(st.sampled_from([f"hs_{index}.safetensors", f"{index}/data_{index}.ckpt", f"data_{index}.pt"]))
    return Entry(index, file, draw(st.integers(0, 2**45)), digest, tokens, sampled, row_id, again)


def parsed(content: bytes, lines_at_once: int = 1) -> tuple[list[Entry], int]:
    """The entries, each as its line is told of, and where the good part ends."""
    lines = BytesIO(content).readlines()
    blocks = [b"".join(lines[n : n + lines_at_once]) for n in range(0, len(lines), lines_at_once)]
    reader, found = parse_journal(blocks, PATH, SAMPLES), list[Entry]()
    while True:
        try:
            offset, told = next(reader)
        except StopIteration as end:
            return found, end.value
        found.append(entry_at(BytesIO(content), offset))
        assert told == Told(**{name: getattr(found[-1], name) for name in Told.__slots__})


@given(st.lists(an_entry(), max_size=8), st.integers(1, 8))
def test_any_entries_are_read_back(entries: list[Entry], lines_at_once: int) -> None:
    content = b"".join(map(encode_entry, entries))
    assert parsed(content, lines_at_once) == (entries, len(content))


@given(st.data(), st.lists(an_entry(), min_size=1, max_size=5))
def test_whatever_is_cut_off_the_rest_is_read(data: st.DataObject, entries: list[Entry]) -> None:
    lines = list(map(encode_entry, entries))
    content = b"".join(lines)
    cut = data.draw(st.integers(0, len(content)))
    whole = next(n for n in range(len(lines), -1, -1) if sum(map(len, lines[:n])) <= cut)
    assert parsed(content[:cut], 3) == (entries[:whole], sum(map(len, lines[:whole])))
    junk = data.draw(st.sampled_from([b"", b"\0" * 7, b"\n", b"\xff\n"]))
    assert parsed(content[:cut] + junk)[0] in (entries[:whole], entries[: whole + 1])


@given(st.data(), st.lists(an_entry(), min_size=1, max_size=4))
def test_any_flipped_bit_is_found(data: st.DataObject, entries: list[Entry]) -> None:
    """In the last line, or the line end before it, it is taken for a torn tail; before, it is refused."""
    lines = list(map(encode_entry, entries))
    content = bytearray(b"".join(lines))
    last_end = len(content) - len(lines[-1]) - 1
    place = data.draw(st.integers(0, len(content) - 1) | st.just(max(last_end, 0)))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    at_once = data.draw(st.integers(1, 4))
    if place >= last_end:
        assert parsed(bytes(content), at_once)[0] == entries[: -2 if place == last_end else -1]
    else:
        with pytest.raises(JournalError) as caught:
            parsed(bytes(content), at_once)
        assert 1 <= caught.value.line < len(entries)


@given(st.binary(max_size=300), st.integers(1, 4))
def test_any_bytes_give_entries_or_a_journal_error(content: bytes, lines_at_once: int) -> None:
    with contextlib.suppress(JournalError):
        assert parsed(content, lines_at_once)[1] <= len(content)
