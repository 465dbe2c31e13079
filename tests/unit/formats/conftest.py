"""Small runs to convert: a fake engine's states, in bfloat16 where torch is installed."""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from vllm_compat.extract import ExtractConfig, extract
from vllm_compat.testing import FakeEngine
from vllm_compat.types import LayerId

MakeRun: TypeAlias = Callable[..., Path]
N = 8
HIDDEN = 8


def bfloat16(rows: list[list[float]]) -> Any:
    """A tensor of the engine's rows."""
    import torch

    return torch.tensor(rows, dtype=torch.bfloat16)


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    """Twelve rows, every third without a loss mask, every fourth without an id."""
    rng = random.Random(0)
    made: list[dict[str, Any]] = []
    for index in range(12):
        length = rng.randrange(1, 20)
        row: dict[str, Any] = {"input_ids": [rng.randrange(1000) for _ in range(length)]}
        if index % 3:
            row["loss_mask"] = [rng.randrange(2) for _ in range(length)]
        if index % 4:
            row["id"] = f"row-{index}"
        made.append(row)
    return made


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that says 8 layers, width 8 and 1000 ids, and has no weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"num_hidden_layers": N, "hidden_size": HIDDEN, "vocab_size": 1000, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture
def make_run(tmp_path: Path, model: Path, rows: list[dict[str, Any]]) -> MakeRun:
    """Extracts the rows into a folder of the test's, which is returned."""

    def make(
        layer_ids: tuple[LayerId, ...], engine: type[FakeEngine] = FakeEngine, name: str = "run", **changes: Any
    ) -> Path:
        for package in ("torch", "xxhash"):
            if not importlib.util.find_spec(package):
                pytest.skip(f"{package} is not installed")
        (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        values: dict[str, Any] = {
            "model": str(model),
            "prepared_data": tmp_path / "data.jsonl",
            "output_dir": tmp_path / name,
            "layer_ids": layer_ids,
        }
        made = engine(layer_ids, num_layers=N, hidden_size=HIDDEN, make_tensor=bfloat16)
        extract(ExtractConfig(**(values | changes)), made)
        return tmp_path / name

    return make
