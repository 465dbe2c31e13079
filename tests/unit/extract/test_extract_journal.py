"""The journal's lines: what is written is read back, a torn tail is cut, a changed line is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest

from vllm_compat.errors import JournalError, UsageError
from vllm_compat.extract import journal as journals
from vllm_compat.extract.journal import (
    Entry,
    Journal,
    Told,
    encode_entry,
    entry_at,
    find_journals,
    journal_name,
    read_journal,
)

PLAIN = Entry(7, "hs_7.safetensors", 1024, "0123456789abcdef", 12, 345)
ENTRIES = [
    PLAIN,
    Entry(0, "hidden_states/hs_0.safetensors", 1, "0" * 16, 1, 0, "row 0"),
    Entry(1, "rows_0-2000/a..b.pt", 2, "f" * 16, 2, None, 'quotes " and \\ and \n and é'),
    Entry(2, "a.pt", 2, "f" * 16, 2, 9, "again", again=3),
    Entry(3, "", 0, "", 2, 9, None, skipped="nonfinite: layer id 2"),
    Entry(4, "", 0, "", 2, None, "x", again=1, skipped="nonfinite: layer id norm"),
]


def written(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / journal_name((0, 1))
    path.write_bytes(content)
    return path


def read(path: Path) -> tuple[list[Entry], int]:
    """The entries of a journal, each as its line is told of, and where its good part ends."""
    reader, found = read_journal(path, 1000), list[Entry]()
    with path.open("rb") as file:
        while True:
            try:
                offset, told = next(reader)
            except StopIteration as end:
                return found, end.value
            found.append(entry_at(file, offset))
            assert told == Told(**{name: getattr(found[-1], name) for name in Told.__slots__})


def framed(fields: Any) -> bytes:
    text = json.dumps(fields, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def test_a_line_is_what_the_format_says() -> None:
    text = b'{"index":7,"file":"hs_7.safetensors","bytes":1024,"xxh3":"0123456789abcdef","tokens":12,"sampled":345}'
    assert encode_entry(PLAIN) == b"%08x " % zlib.crc32(text) + text + b"\n"
    assert encode_entry(ENTRIES[4]).endswith(b' {"index":3,"tokens":2,"sampled":9,"skipped":"nonfinite: layer id 2"}\n')


def test_what_is_appended_is_read_back(tmp_path: Path) -> None:
    journal = Journal(tmp_path, (1, 4))
    journal.recover(0)
    for entry in ENTRIES:
        journal.append(entry)
    journal.close()
    path = tmp_path / "journal-1-of-4.jsonl"
    assert read(path) == (ENTRIES, path.stat().st_size)


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_line_that_was_changed_since_is_refused(tmp_path: Path, entry: Entry) -> None:
    path = written(tmp_path, encode_entry(entry).replace(b'"tokens":', b'"tokens":1'))
    with path.open("rb") as file, pytest.raises(JournalError, match="was changed while it was read"):
        entry_at(file, 0)


@pytest.mark.parametrize("tail", [b"", b"x", encode_entry(PLAIN)[:-1]])
def test_a_journal_of_many_blocks(tmp_path: Path, tail: bytes) -> None:
    """Where a block ends is nothing that a line must know: offsets and numbers go on from one to the next."""
    entries = [dataclasses.replace(ENTRIES[n % len(ENTRIES)], index=n) for n in range(999)]
    good = b"".join(map(encode_entry, entries))
    for size in (1, 100, 1000, len(good) - 1, len(good), 2 * len(good)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(journals, "_BLOCK", size)
            path = written(tmp_path, good + tail)
            assert read(path) == (entries, len(good))
            path = written(tmp_path, good + b"x\n" + encode_entry(PLAIN) + tail)
            with pytest.raises(JournalError, match="line 1000 is not"):
                read(path)


@pytest.mark.parametrize("tail", [b"x", b"\n", b"\0" * 30, encode_entry(PLAIN)[:-1], b"00000000 {}\n", b"\xff\n"])
def test_a_torn_tail_is_read_past_and_cut(tmp_path: Path, tail: bytes) -> None:
    good = b"".join(map(encode_entry, ENTRIES))
    path = written(tmp_path, good + tail)
    entries, end = read(path)
    assert (entries, end) == (ENTRIES, len(good))
    journal = Journal(tmp_path, (0, 1))
    journal.recover(end)
    journal.append(PLAIN)
    journal.close()
    assert path.read_bytes() == good + encode_entry(PLAIN)


@pytest.mark.parametrize("line", [1, 2, 6])
def test_a_bad_line_before_another_is_refused_with_its_number(tmp_path: Path, line: int) -> None:
    lines = [*map(encode_entry, ENTRIES), encode_entry(PLAIN)]
    lines[line - 1] = lines[line - 1].replace(b'"tokens":', b'"tokens":1')
    with pytest.raises(JournalError, match=rf"journal-0-of-1\.jsonl: line {line} is not what was written") as caught:
        read(written(tmp_path, b"".join(lines)))
    assert (caught.value.line, caught.value.exit_code) == (line, 5)
    assert caught.value.path.endswith("journal-0-of-1.jsonl")


@pytest.mark.parametrize(
    "changes",
    [
        {"index": -1},
        {"index": "7"},
        {"index": True},
        {"file": "../hs_7.safetensors"},
        {"file": "a/../../b"},
        {"file": "a/.b"},
        {"file": "a//b"},
        {"file": "a/"},
        {"file": "/etc/passwd"},
        {"file": ""},
        {"file": 3},
        {"bytes": 1.5},
        {"sampled": "1"},
        {"id": 3},
        {"again": None},
        {"another": 1},
    ],
)
def test_lines_that_this_program_does_not_write_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    fields = {"index": 7, "file": "a.pt", "bytes": 1, "xxh3": "0" * 16, "tokens": 1, "sampled": 1}
    assert read(written(tmp_path, framed(fields)))[0]
    with pytest.raises(JournalError, match="line 1 is not"):
        read(written(tmp_path, framed(fields | changes) + framed(fields)))


@pytest.mark.parametrize("other", [[], 1, None, "text", {}])
def test_other_json_is_refused(tmp_path: Path, other: Any) -> None:
    with pytest.raises(JournalError, match="line 1 is not"):
        read(written(tmp_path, framed(other) + encode_entry(PLAIN)))


def test_a_sample_that_the_run_has_not(tmp_path: Path) -> None:
    path = written(tmp_path, encode_entry(PLAIN))
    assert len(list(read_journal(path, 8))) == 1
    with pytest.raises(JournalError, match="line 1 names sample 7 of a run of 7"):
        list(read_journal(path, 7))


@pytest.mark.parametrize("file", ["../x", "a/../x", "a/.x", "with blank", "é.pt", ".hidden", "/x"])
def test_a_file_that_cannot_be_told_is_never_written(tmp_path: Path, file: str) -> None:
    journal = Journal(tmp_path, (0, 1))
    journal.recover(0)
    with pytest.raises(JournalError, match="cannot be told"):
        journal.append(Entry(7, file, 1, "0" * 16, 1, 1))
    journal.close()
    assert (tmp_path / journal_name((0, 1))).read_bytes() == b""


def test_a_shard_belongs_to_one_process(tmp_path: Path) -> None:
    journal = Journal(tmp_path, (0, 2))
    with pytest.raises(UsageError, match=r"another process extracts shard 0/2 into .*--shard"):
        Journal(tmp_path, (0, 2))
    Journal(tmp_path, (1, 2)).close()
    child = os.fork()
    if not child:  # a forked worker that outlives this process must not keep the lock
        os._exit(0 if not os.path.exists(f"/proc/self/fd/{journal._file.descriptor}") else 1)  # noqa: PTH110
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(UsageError):
        Journal(tmp_path, (0, 2))
    journal.close()
    Journal(tmp_path, (0, 2)).close()


def test_journals_are_found_in_order(tmp_path: Path) -> None:
    for name in ("journal-10-of-16.jsonl", "journal-2-of-16.jsonl", "journal-0-of-1.jsonl", "journal-a-of-1.jsonl"):
        (tmp_path / name).touch()
    assert [shard for _, shard in find_journals(tmp_path)] == [(0, 1), (2, 16), (10, 16)]
