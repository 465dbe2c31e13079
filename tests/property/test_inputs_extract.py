"""File i is sample i's, whatever the engine's budgets and the order in which requests end."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from vllm_compat.extract import ExtractConfig, extract
from vllm_compat.testing import FakeEngine, fake_row
from vllm_compat.types import LayerId

HIDDEN = 4
LAYERS: tuple[LayerId, ...] = (3, "norm", 0)


@settings(max_examples=30, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=9), min_size=1, max_size=64),
    budget=st.integers(1, 40),
    most=st.integers(1, 9),
    batch_size=st.integers(1, 9),
    max_seq_len=st.integers(1, 10),
)
def test_file_i_is_sample_i(
    prompts: list[list[int]], budget: int, most: int, batch_size: int, max_seq_len: int
) -> None:
    engine = FakeEngine(
        LAYERS, hidden_size=HIDDEN, max_num_batched_tokens=budget, max_num_seqs=most, make_tensor=np.array
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "data.jsonl"
        data.write_text("".join(json.dumps({"input_ids": prompt}) + "\n" for prompt in prompts))
        summary = extract(
            ExtractConfig("m", data, folder / "out", LAYERS, batch_size=batch_size, max_seq_len=max_seq_len), engine
        )
        assert summary.samples == len(prompts) == len(list((folder / "out").glob("hs_*")))
        for index, prompt in enumerate(prompts):
            kept = prompt[:max_seq_len]
            found = load_file(folder / "out" / f"hs_{index}.safetensors")
            assert found["token_ids"].tolist() == kept
            states = [[fake_row(i, kept[: n + 1], HIDDEN) for i in LAYERS] for n in range(len(kept))]
            assert np.array_equal(found["hidden_states"], np.array(states, dtype=np.float32))
