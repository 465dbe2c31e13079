"""What is not of a run, in every format: strangers are found, what a dead process left is removed, the rest is kept."""

from __future__ import annotations

import random
import tracemalloc
from pathlib import Path

import pytest

from vllm_compat.extract.done import SealedEntries
from vllm_compat.extract.journal import Entry, encode_entry
from vllm_compat.extract.names import Names
from vllm_compat.extract.sweep import find_strangers, sweep
from vllm_compat.formats import FORMATS, Format, get_format

IDS = ("row-0", None, "two words", "row-3", "row-4")
TOTAL = len(IDS)
OWED, SKIPPED = 3, 4


@pytest.fixture(params=FORMATS)
def form(request: pytest.FixtureRequest) -> Format:
    return get_format(request.param)


@pytest.fixture
def folder(tmp_path: Path, form: Format) -> Path:
    """A run of five samples: three are done, one is owed and one was skipped."""
    lines = [Entry(SKIPPED, "", 0, "", 5, 1, IDS[SKIPPED], skipped="nonfinite: layer id 2")]
    for index in range(OWED):
        name = str(form.file(index, IDS[index]))
        put(tmp_path / name)
        lines.append(Entry(index, name, 3, "0" * 16, 5, 1, IDS[index]))
    (tmp_path / "journal-0-of-1.jsonl").write_bytes(b"".join(map(encode_entry, lines)))
    for name in ("run.json", "draft_config.json", "notes.txt", "token_freq.pth", "data-00000-of-00001.arrow"):
        put(tmp_path / name)
    return tmp_path


def put(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"abc")
    return path


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_run_has_no_strangers(folder: Path, form: Format) -> None:
    put(folder / f"others/deep{form.file(0, None).suffix}")
    assert list(find_strangers(folder, form, SealedEntries(folder, TOTAL))) == []


@pytest.mark.parametrize("index", [OWED, SKIPPED, TOTAL, 10**6])
@pytest.mark.parametrize("sample_id", ["row-of-another-run", "not for a name", None])
def test_a_stranger_is_found(folder: Path, form: Format, index: int, sample_id: str | None) -> None:
    own = {str(form.file(i, IDS[i])) for i in range(OWED)}
    assert set(find_strangers(folder, form)) == own, "of an earlier run, whose record is gone"
    name = str(form.file(index, sample_id))
    put(folder / name)
    assert list(find_strangers(folder, form, SealedEntries(folder, TOTAL))) == [name]
    assert set(find_strangers(folder, form)) == {*own, name}


def test_what_a_dead_process_left_is_swept_and_all_else_is_kept(folder: Path, form: Format) -> None:
    kept = files_of(folder)
    sample = folder / form.file(0, IDS[0])
    for owner in ("0-of-1", "1-of-4", "run"):
        put(sample.with_name(f".{sample.stem}.tmp-{owner}-0123abcd"))
    assert len(files_of(folder)) == len(kept) + 3
    sweep(folder, (0, 1))
    assert files_of(folder) == kept
    assert SealedEntries(folder, TOTAL).done.num_files == OWED


def test_a_hidden_folder_is_no_part_of_the_run(folder: Path, form: Format) -> None:
    """As that of a rehearsal, which another process may be at."""
    sample = folder / ".vllm-compat-rehearsal-0/out" / form.file(9, "row-9")
    put(sample)
    put(sample.with_name(f".{sample.stem}.tmp-0-of-1-0123abcd"))
    before = files_of(folder)
    sweep(folder, (0, 1))
    assert files_of(folder) == before
    assert list(find_strangers(folder, form, SealedEntries(folder, TOTAL))) == []


def test_names_take_eight_bytes_each() -> None:
    count, names = 40_000, Names()
    order = random.Random(0).sample(range(count), count)
    tracemalloc.start()
    try:
        for number in order:
            names.add(f"a rather long folder/hs_{number}.safetensors")
        names.end()
        assert tracemalloc.get_traced_memory()[1] < count * 10 + 200_000
    finally:
        tracemalloc.stop()
    assert all(f"a rather long folder/hs_{number}.safetensors" in names for number in range(count))
    assert not any(f"a rather long folder/hs_{number}.safetensors" in names for number in range(count, 2 * count))
    assert "x" not in Names()
