"""A whole extraction over the fake engine: what is written, and how the engine is opened."""

from __future__ import annotations

import dataclasses
import json
import logging
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import vllm_compat
import vllm_compat.engine
from vllm_compat.errors import (
    UsageError,
)
from vllm_compat.extract import extract
from vllm_compat.testing import FakeEngine

if TYPE_CHECKING:
    from tests.unit.extract.conftest import (
        MakeConfig,
        MakeEngine,
        Read,
        RunOf,
        SamplesIn,
        SomeRows,
        StatesOf,
        WriteRows,
    )


def test_every_file_is_its_samples(
    config: MakeConfig,
    make_engine: MakeEngine,
    write_rows: WriteRows,
    read: Read,
    states_of: StatesOf,
    some_rows: SomeRows,
    run_of: RunOf,
    samples_in: SamplesIn,
) -> None:
    rows = some_rows(9)
    rows[4]["loss_mask"] = [n % 2 for n in range(len(rows[4]["input_ids"]))]
    del rows[5]["id"]
    write_rows(rows)
    settings = config()
    summary = extract(settings, make_engine(max_num_batched_tokens=17, max_num_seqs=3))

    folder = Path(settings.output_dir)
    assert samples_in(folder) == sorted(f"hs_{n}.safetensors" for n in range(9))
    for index, row in enumerate(rows):
        tensors, metadata = read(folder / f"hs_{index}.safetensors")
        assert tensors["token_ids"].tolist() == row["input_ids"]
        assert np.array_equal(tensors["hidden_states"], states_of(row["input_ids"]))
        assert tensors.keys() == {"token_ids", "hidden_states"} | ({"loss_mask"} & row.keys())
        assert metadata == {
            "layer_ids": '[2, 0, "norm"]',
            "layer_id_convention": "k = residual stream leaving decoder layer k, 0-based, before the final norm; "
            "norm = after it",
            "index": str(index),
            "model": settings.model,
            "model_revision": metadata["model_revision"],
            "post_norm": "[false, false, true]",
            "sampled_token": str(zlib.crc32(repr(tuple(row["input_ids"])).encode()) % 1000),
            "vllm_version": metadata["vllm_version"],
            "vllm_compat_version": vllm_compat.__version__,
        } | ({"sample_id": str(row["id"])} if "id" in row else {})
    assert read(folder / "hs_4.safetensors")[0]["loss_mask"].tolist() == rows[4]["loss_mask"]

    assert summary.samples == 9
    assert summary.tokens == sum(len(row["input_ids"]) for row in rows)
    assert summary.bytes == sum(path.stat().st_size for path in folder.glob("hs_*"))
    assert summary.output_dir == str(folder)
    assert summary.tokens_per_second == pytest.approx(summary.tokens / summary.seconds)
    run = run_of(folder)
    assert run["complete"] is True
    assert run["summary"] == dataclasses.asdict(summary)
    assert run["identity"]["num_samples"] == 9
    assert run["identity"]["layer_ids"] == [2, 0, "norm"]
    assert run["input"]["file"] == "data.jsonl"
    assert run["config"]["batch_size"] == 2
    assert json.loads((folder / "draft_config.json").read_text()) == {"eagle_aux_hidden_state_layer_ids": [3, 1]}


def test_long_samples_are_cut_and_counted(
    config: MakeConfig,
    make_engine: MakeEngine,
    write_rows: WriteRows,
    read: Read,
    states_of: StatesOf,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "vllm_compat")
    write_rows([{"input_ids": [*range(1, 11)], "loss_mask": [0] * 7 + [1] * 3}, {"input_ids": [*range(8)]}])
    settings = config(max_seq_len=8)
    assert extract(settings, make_engine()).truncated == 1
    tensors, _ = read(Path(settings.output_dir) / "hs_0.safetensors")
    assert tensors["token_ids"].tolist() == [*range(1, 9)]
    assert tensors["loss_mask"].tolist() == [0] * 7 + [1]
    assert np.array_equal(tensors["hidden_states"], states_of([*range(1, 9)]))
    *start, end, draft = caplog.messages
    assert "samples: 2, 16 tokens, 8 at most; 1 are cut" in start
    assert "states on disk: 48 bytes a token (3 layers x 8 x 2 bytes)" in start
    assert "all 2 samples are written" in end
    assert "1 samples cut" in end
    assert draft == """for the draft model's config.json: "eagle_aux_hidden_state_layer_ids": [3, 1]"""


def test_the_engine_is_opened_as_asked_and_closed(
    config: MakeConfig,
    make_engine: MakeEngine,
    write_rows: WriteRows,
    monkeypatch: pytest.MonkeyPatch,
    some_rows: SomeRows,
    run_of: RunOf,
) -> None:
    write_rows(some_rows(3))
    opened: list[tuple[str, dict[str, Any]]] = []
    engine = make_engine(layer_ids=(2, 4, 5, 7))

    def open_engine(model: str, **options: Any) -> FakeEngine:
        assert run_of(Path(settings.output_dir))["complete"] is False, "run.json is there before the model loads"
        opened.append((model, options))
        return engine

    monkeypatch.setattr(vllm_compat.engine, "open_engine", open_engine)
    settings = config(layer_ids=None, tensor_parallel_size=8, gpu_memory_utilization=0.8, engine_options={"seed": 1})
    extract(settings)
    assert opened == [
        (
            settings.model,
            {
                "layer_ids": (2, 4, 5, 7),
                "tensor_parallel_size": 8,
                "max_model_len": 65,
                "max_num_seqs": 2,
                "gpu_memory_utilization": 0.8,
                "dtype": "auto",
                "seed": 1,
            },
        )
    ]
    assert engine.closed


@pytest.mark.parametrize(("positions", "limit"), [(32, 31), (64, 63), (65, 64), (4096, 64)])
def test_the_models_positions_bound_a_sample(
    config: MakeConfig,
    make_engine: MakeEngine,
    model: Path,
    write_rows: WriteRows,
    read: Read,
    caplog: pytest.LogCaptureFixture,
    positions: int,
    limit: int,
) -> None:
    (model / "config.json").write_text(json.dumps({"num_hidden_layers": 8, "max_position_embeddings": positions}))
    write_rows([{"input_ids": [1] * 64}])
    settings = config()
    summary = extract(settings, make_engine(max_model_len=limit + 1))
    assert summary.truncated == (limit < 64)
    tensors, _ = read(Path(settings.output_dir) / "hs_0.safetensors")
    assert len(tensors["token_ids"]) == limit
    warned = any(f"samples are cut at {limit} tokens, not at 64" in message for message in caplog.messages)
    assert warned == (limit < 64)


def test_a_callers_engine_is_left_open_and_its_layers_are_the_default(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, read: Read, some_rows: SomeRows
) -> None:
    write_rows(some_rows(2))
    engine = make_engine(layer_ids=(6, 1))
    settings = config(layer_ids=None)
    extract(settings, engine)
    assert not engine.closed
    assert read(Path(settings.output_dir) / "hs_0.safetensors")[1]["layer_ids"] == "[6, 1]"
    with pytest.raises(UsageError, match="captures the layers"):
        extract(config(output_dir=Path(settings.output_dir) / "2", layer_ids=(1, 6)), engine)
