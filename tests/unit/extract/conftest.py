"""What the tests of the extraction share: rows, files of rows, a model folder, and an engine that captures arrays."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open
from tests.unit.extract.tree import tree_of as tree_of_folder

import vllm_compat.engine
from vllm_compat.extract import ExtractConfig
from vllm_compat.extract.journal import Entry
from vllm_compat.testing import FakeEngine, fake_row
from vllm_compat.types import LayerId

LAYERS: tuple[LayerId, ...] = (2, 0, "norm")
HIDDEN = 8

MakeConfig: TypeAlias = Callable[..., ExtractConfig]
MakeEngine: TypeAlias = Callable[..., FakeEngine]
Row: TypeAlias = dict[str, Any]
RunOf: TypeAlias = Callable[[Path], dict[str, Any]]
SamplesIn: TypeAlias = Callable[[Path], list[str]]
SomeRows: TypeAlias = Callable[[int], list[Row]]
TreeOf: TypeAlias = Callable[[Path], tuple[dict[str, bytes], list[Entry]]]
WriteRows: TypeAlias = Callable[[Sequence[Any]], Path]
Read: TypeAlias = Callable[[Path], tuple[dict[str, NDArray[Any]], dict[str, str]]]
StatesOf: TypeAlias = Callable[..., NDArray[np.float32]]


def _read(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    with safe_open(str(path), framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def _states_of(tokens: Sequence[int], layer_ids: Sequence[LayerId] = LAYERS) -> NDArray[np.float32]:
    states = [[fake_row(i, tokens[: n + 1], HIDDEN) for i in layer_ids] for n in range(len(tokens))]
    return np.array(states, dtype=np.float32)


@pytest.fixture
def some_rows() -> SomeRows:
    """Rows of 1 to 39 tokens, the same for the same count."""

    def make(count: int) -> list[Row]:
        rng = random.Random(0)
        lengths = [rng.randrange(1, 40) for _ in range(count)]
        return [{"input_ids": [rng.randrange(1000) for _ in range(n)], "id": i} for i, n in enumerate(lengths)]

    return make


@pytest.fixture
def run_of() -> RunOf:
    """The ``run.json`` of an output folder."""

    def read(folder: Path) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((folder / "run.json").read_text())
        return found

    return read


@pytest.fixture
def samples_in() -> SamplesIn:
    """Names of the samples in a folder, which has nothing half-written."""

    def names(folder: Path) -> list[str]:
        assert not list(folder.glob(".*.tmp-*")), "a temporary file was left behind"
        return sorted(path.name for path in folder.glob("hs_*"))

    return names


@pytest.fixture
def tree_of() -> TreeOf:
    """What must be the same, byte by byte, after any run to the end: see ``tree``."""
    return tree_of_folder


@pytest.fixture
def read() -> Read:
    """Tensors and metadata of a file, read by safetensors itself."""
    return _read


@pytest.fixture
def states_of() -> StatesOf:
    """What ``FakeEngine`` captures for tokens, as [tokens, layers, hidden]."""
    return _states_of


@pytest.fixture
def write_rows(tmp_path: Path) -> WriteRows:
    def write(rows: Sequence[Any]) -> Path:
        path = tmp_path / "data.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that says 8 layers, width 8 and 1000 ids, as ``make_engine`` has them."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"num_hidden_layers": 8, "hidden_size": HIDDEN, "vocab_size": 1000, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture
def config(tmp_path: Path, model: Path) -> MakeConfig:
    def make(**changes: Any) -> ExtractConfig:
        values: dict[str, Any] = {
            "model": str(model),
            "prepared_data": tmp_path / "data.jsonl",
            "output_dir": tmp_path / "out",
            "layer_ids": LAYERS,
            "batch_size": 2,
            "max_seq_len": 64,
            "rehearsal": False,
        }
        return ExtractConfig(**(values | changes))

    return make


@pytest.fixture
def make_engine() -> MakeEngine:
    def make(kind: type[FakeEngine] = FakeEngine, **changes: Any) -> FakeEngine:
        values: dict[str, Any] = {"layer_ids": LAYERS, "num_layers": 8, "hidden_size": HIDDEN, "make_tensor": np.array}
        return kind(**(values | changes))

    return make


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is refused, is refused before the model loads."""

    def open_engine(*_: object, **__: object) -> FakeEngine:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(vllm_compat.engine, "open_engine", open_engine)
