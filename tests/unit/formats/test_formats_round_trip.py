"""Every format: what is decoded is what was encoded, bit by bit, and the file's name comes from integers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_compat.formats import FORMATS, SampleData, SampleFileError, get_format
from vllm_compat.types import NORM, LayerId

torch: Any = pytest.importorskip("torch")

EXACT = [name for name in FORMATS if name != "speculators-fp8"]
DTYPES = {"bfloat16": torch.int16, "float32": torch.int32, "float16": torch.int16}


@st.composite
def samples(draw: st.DrawFn) -> SampleData:
    """Values of any size in any order of layers, any text."""
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    tokens, hidden = draw(st.integers(1, 6)), draw(st.sampled_from([1, 3, 8]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    every: list[LayerId] = [0, 7, 30, NORM]
    states = torch.randn(tokens, 4, hidden, generator=generator) * 10.0 ** draw(st.integers(-4, 4))
    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
    mask = st.lists(st.integers(0, 1), min_size=tokens, max_size=tokens).map(tuple)
    return SampleData(
        index=draw(st.integers(0, 10**7)),
        id=draw(st.none() | text),
        token_ids=tuple(draw(st.lists(st.integers(0, 2**40), min_size=tokens, max_size=tokens))),
        loss_mask=draw(st.none() | mask),
        layer_ids=tuple(draw(st.permutations(every))),
        hidden_states=states.to(getattr(torch, dtype)),
        metadata=draw(st.dictionaries(text, text, max_size=3)),
    )


def for_format(name: str, data: SampleData) -> SampleData:
    """The same, of the one layer that the format has a place for."""
    layers = slice(0, 1) if name == "eagle" else slice(None)
    return SampleData(
        data.index,
        data.id,
        data.token_ids,
        data.loss_mask,
        data.layer_ids[layers],
        data.hidden_states[:, layers],
        data.metadata,
    )


def written(folder: Path, name: str, data: SampleData) -> Path:
    path = folder / get_format(name).file(data.index, data.id)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(get_format(name).encode(data)))
    return path


def same_bits(left: Any, right: Any) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    kind = DTYPES[str(left.dtype).removeprefix("torch.")]
    return bool(torch.equal(left.contiguous().view(kind), right.contiguous().view(kind)))


@pytest.mark.parametrize("name", EXACT)
@given(data=samples())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_way_back(name: str, data: SampleData, tmp_path: Path) -> None:
    data = for_format(name, data)
    path = written(tmp_path, name, data)
    back = get_format(name).decode(path, data.index)
    row = get_format(name).row(path)
    assert (row.token_ids, row.loss_mask) == (data.token_ids, data.loss_mask)
    assert (back.index, back.id, back.token_ids, back.loss_mask) == (
        data.index,
        data.id,
        data.token_ids,
        data.loss_mask,
    )
    assert back.layer_ids == data.layer_ids
    assert same_bits(back.hidden_states, data.hidden_states)
    assert data.file_metadata().items() <= back.metadata.items()
    assert json.loads(back.metadata["layer_ids"]) == list(data.layer_ids)


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_is_the_same_every_time(name: str) -> None:
    layer_ids: tuple[LayerId, ...] = (0, 1, 2, 3)
    text = "of a value twice, "
    one_object, two_objects = {"a": text, "b": text}, {"b": text[:5] + text[5:], "a": text}
    assert two_objects["a"] is not two_objects["b"]
    first, second = (
        for_format(name, SampleData(0, None, (1, 2), (0, 1), layer_ids, torch.ones(2, 4, 8), metadata))
        for metadata in (one_object, two_objects)
    )
    assert b"".join(get_format(name).encode(first)) == b"".join(get_format(name).encode(second))


@pytest.mark.parametrize("name", FORMATS)
@given(index=st.integers(0, 10**9), sample_id=st.none() | st.text(max_size=200) | st.sampled_from(["..", "a/b", "a\n"]))
@settings(max_examples=100, deadline=None)
def test_a_name_stays_in_the_folder(name: str, index: int, sample_id: str | None) -> None:
    path = get_format(name).file(index, sample_id)
    assert not path.is_absolute()
    assert all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,140}", part) for part in path.parts)
    assert name == "modelopt" or str(index) in path.name


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("content", [b"", b"x" * 100, b"PK\x03\x04" + b"\x00" * 200])
def test_something_else(name: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    path.write_bytes(content)
    for read in (get_format(name).row, lambda path: get_format(name).decode(path, 0)):
        with pytest.raises(SampleFileError, match=re.escape(str(path))):
            read(path)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "safetensors"])
def test_a_file_of_another_format(name: str, tmp_path: Path) -> None:
    other = "safetensors" if name in ("specforge", "modelopt", "eagle", "speculators-v1") else "specforge"
    data = SampleData(0, None, (1, 2), (0, 1), (0, 1, 2, NORM), torch.ones(2, 4, 8), {})
    with pytest.raises(SampleFileError):
        get_format(name).decode(written(tmp_path, other, data), 0)


@pytest.mark.parametrize("name", FORMATS)
def test_a_missing_file(name: str, tmp_path: Path) -> None:
    with pytest.raises(SampleFileError, match=r"nothing\.pt"):
        get_format(name).decode(tmp_path / "nothing.pt", 0)


def test_an_archive_runs_no_code(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "ran",)

    path = tmp_path / "data_0.pt"
    torch.save({"input_ids": Bomb()}, path)
    with pytest.raises(SampleFileError, match="cannot be read as speculators-v1"):
        get_format("speculators-v1").decode(path, 0)
    assert not (tmp_path / "ran").exists()


def test_numpys_states_in_an_archive(tmp_path: Path) -> None:
    np: Any = pytest.importorskip("numpy")
    states = np.arange(32, dtype=np.float32).reshape(2, 4, 4)
    data = SampleData(0, None, (1, 2), None, (0, 1, 2, 3), states, {})
    back = get_format("speculators-v1").decode(written(tmp_path, "speculators-v1", data), 0)
    assert np.array_equal(back.hidden_states.numpy(), states)
