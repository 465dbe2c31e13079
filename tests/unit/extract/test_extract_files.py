"""Files are whole or not there, and safetensors reads what was written."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from vllm_compat.errors import StorageError
from vllm_compat.extract.files import AppendOnly, make_folder, owner_of_temporary, safetensors_parts, write_whole
from vllm_compat.extract.tensors import Blob, int64_blob


def test_safetensors_reads_it(tmp_path: Path) -> None:
    states = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    blobs = {
        "token_ids": int64_blob([5, 2**40, 0]),
        "hidden_states": Blob("F32", states.shape, memoryview(states.tobytes())),
    }
    path = tmp_path / "a.safetensors"
    size = write_whole(path, safetensors_parts(blobs, {"model": "\udcffé"}))
    assert size == path.stat().st_size
    found = load_file(path)
    assert found["token_ids"].tolist() == [5, 2**40, 0]
    assert found["token_ids"].dtype == np.int64
    assert np.array_equal(found["hidden_states"], states)


@pytest.mark.parametrize("length", range(8))
def test_tensors_begin_at_multiples_of_eight(length: int) -> None:
    parts = safetensors_parts({"a": int64_blob([1])}, {"x": "y" * length})
    assert len(parts[1]) % 8 == 0
    assert int.from_bytes(parts[0], "little") == len(parts[1])


def test_the_mode_is_the_umasks(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        write_whole(tmp_path / "a", [b"x"])
    finally:
        os.umask(old)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


def test_the_temporary_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def fsync(_: int) -> None:
        seen.append([path.name for path in tmp_path.iterdir()])

    monkeypatch.setattr(os, "fsync", fsync)
    write_whole(tmp_path / "hs_3.safetensors", [b"x"], owner="0-of-4")
    [name] = seen[0]
    assert owner_of_temporary(name) == "0-of-4"
    assert owner_of_temporary("hs_3.safetensors") is None
    assert name.startswith(".hs_3.tmp-")
    assert not name.endswith(("pt", ".safetensors"))
    assert seen[1:] == [["hs_3.safetensors"]], "the folder is synced after the rename"


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda d, data: real(d, data[:3]))
    assert write_whole(tmp_path / "a", [b"0123456789", b"abcd"]) == 14
    assert (tmp_path / "a").read_bytes() == b"0123456789abcd"


def _no_space(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("call", ["write", "fsync", "open"])
def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, call, _no_space)
        with pytest.raises(StorageError, match=r"a\.safetensors cannot be written: No space left") as caught:
            write_whole(tmp_path / "a.safetensors", [b"x"])
    assert isinstance(caught.value.__cause__, OSError)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole(tmp_path / "run.json", [b"old"])
    monkeypatch.setattr(os, "write", _no_space)
    with pytest.raises(StorageError):
        write_whole(tmp_path / "run.json", [b"new"])
    assert (tmp_path / "run.json").read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 1


def test_an_interrupt_while_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "a", [b"x"])
    assert list(tmp_path.iterdir()) == []


def _second_call_fails(number: int) -> Callable[[int], None]:
    calls: list[int] = []

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(number, os.strerror(number))

    return fsync


def test_a_file_system_that_syncs_no_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", _second_call_fails(errno.EINVAL))
    write_whole(tmp_path / "a", [b"x"])
    monkeypatch.setattr(os, "fsync", _second_call_fails(errno.EIO))
    with pytest.raises(StorageError, match="b cannot be written"):
        write_whole(tmp_path / "b", [b"x"])


def test_a_blob_shows_no_bytes() -> None:
    assert "memory" not in repr(Blob("I64", (1,), memoryview(b"x" * 8)))


def test_folders_are_made_durable_from_the_top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda d: synced.append(str(Path(f"/proc/self/fd/{d}").readlink())))
    make_folder(tmp_path / "a" / "b")
    assert synced == [str(tmp_path), str(tmp_path / "a")]
    make_folder(tmp_path / "a" / "b")
    assert len(synced) == 2


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_record_that_cannot_be_appended_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    file = AppendOnly(tmp_path / "a")
    file.cut(0)
    file.append(b"one\n")
    real = getattr(os, call)
    calls: list[int] = []

    def fails(descriptor: int, data: bytes = b"") -> Any:
        calls.append(descriptor)
        if call == "write" and len(calls) == 1:
            return real(descriptor, data[:2])  # some of it is there before the disk is full
        return _no_space()

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        with pytest.raises(StorageError, match="a cannot be written: No space left") as caught:
            file.append(b"two\n")
    assert (caught.value.errno, caught.value.path) == (errno.ENOSPC, str(tmp_path / "a"))
    assert (tmp_path / "a").read_bytes() == b"one\n"
    file.append(b"three\n")
    assert (tmp_path / "a").read_bytes() == b"one\nthree\n"
    file.close()
