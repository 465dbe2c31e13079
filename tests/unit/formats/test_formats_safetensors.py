"""``safetensors``: what is written is what is read, with numpy alone and with torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from vllm_compat.errors import UsageError
from vllm_compat.formats import SampleData, SampleFileError, get_format


def sample(**changes: Any) -> SampleData:
    values: dict[str, Any] = {
        "index": 3,
        "id": "row 3",
        "token_ids": (5, 2**40),
        "loss_mask": (0, 1),
        "layer_ids": (1, 0, "norm"),
        "hidden_states": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
        "metadata": {"model": "m"},
    }
    return SampleData(**(values | changes))


def written(folder: Path, data: SampleData) -> Path:
    path = folder / get_format("safetensors").file(data.index, data.id)
    path.write_bytes(b"".join(get_format("safetensors").encode(data)))
    return path


def test_safetensors_itself_reads_it(tmp_path: Path) -> None:
    found = load_file(written(tmp_path, sample()))
    assert sorted(found) == ["hidden_states", "loss_mask", "token_ids"]
    assert np.array_equal(found["hidden_states"], sample().hidden_states)
    assert found["token_ids"].dtype == np.int64


@pytest.mark.parametrize("changes", [{}, {"loss_mask": None, "id": None}])
def test_the_way_back(tmp_path: Path, changes: dict[str, Any]) -> None:
    data = sample(**changes)
    back = get_format("safetensors").decode(written(tmp_path, data), 3)
    assert (back.index, back.id, back.token_ids, back.loss_mask) == (3, data.id, data.token_ids, data.loss_mask)
    assert back.layer_ids == data.layer_ids
    assert np.array_equal(np.asarray(back.hidden_states), data.hidden_states)
    assert back.metadata == data.file_metadata()
    assert back.metadata["model"] == "m"


def test_an_unknown_format() -> None:
    with pytest.raises(UsageError, match="no format 'parquet'; the formats are safetensors, per-layer"):
        get_format("parquet")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: b"", "cannot be read"),
        (lambda raw: raw[:-1], "cannot be read"),
        (lambda raw: raw.replace(b"token_ids", b"token_idz"), "no tensor 'token_ids'"),
        (lambda raw: raw.replace(b"[1, 0, ", b"[1, 00,"), "no layer_ids that can be read"),
        (lambda raw: raw.replace(b"[1, 0, ", b"[1,   " + b" "), "states have the shape"),
        (lambda raw: raw.replace(b'\\"norm\\"', b'\\"nrom\\"'), "not a list of layer ids"),
    ],
)
def test_a_damaged_file(tmp_path: Path, change: Any, message: str) -> None:
    path = written(tmp_path, sample())
    changed = change(path.read_bytes())
    assert changed != path.read_bytes()
    path.write_bytes(changed)
    with pytest.raises(SampleFileError, match=message) as caught:
        get_format("safetensors").decode(path, 3)
    assert caught.value.exit_code == 5
    assert str(path) in str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(SampleFileError, match=r"hs_0\.safetensors cannot be read"):
        get_format("safetensors").decode(tmp_path / "hs_0.safetensors", 0)
