"""The command line that the project was born from, on a real model; its files against HF transformers."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import oracle
import pytest
from extraction import KEPT, rows_of_text, run_extract
from safetensors import safe_open

from conftest import ON_GPU, skip_if_faulty


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    """Files of one run, and what it printed."""
    rows = rows_of_text(model("smollm2"))
    for row in rows:
        length = len(row["input_ids"])
        row["loss_mask"] = [int(p >= length // 2) for p in range(length)]
    options = "--batch-size 2 --tp-size 1 --gpu-memory-utilization 0.80 --layer-ids 2 27 15 29"
    output, done = run_extract(model("smollm2"), tmp_path_factory.mktemp("extract"), rows, *options.split())
    return rows, output, done


def read(output, index):
    with safe_open(output / f"hs_{index}.safetensors", "pt") as file:
        return {k: file.get_tensor(k) for k in file.keys()}, file.metadata()  # noqa: SIM118


def test_one_file_for_each_sample_with_its_own_tokens(run):
    rows, output, _ = run
    assert len(list(output.glob("hs_*.safetensors"))) == len(rows)
    for index, row in enumerate(rows):
        tensors, metadata = read(output, index)
        assert tensors["token_ids"].tolist() == row["input_ids"][:KEPT]
        assert tensors["loss_mask"].tolist() == row["loss_mask"][:KEPT]
        assert tuple(tensors["hidden_states"].shape) == (min(len(row["input_ids"]), KEPT), 4, 576)
        assert str(tensors["hidden_states"].dtype) == "torch.bfloat16"
        assert json.loads(metadata["layer_ids"]) == [2, 27, 15, 29]


def test_states_are_those_of_the_layers_asked_for(run, model):
    """No further from the exact states than twice what HF's own bfloat16 is, and far from the neighbouring layers."""
    if not ON_GPU:
        skip_if_faulty("bfloat16")
    rows, output, _ = run
    for index in (0, 8):
        token_ids = rows[index]["input_ids"]
        states = read(output, index)[0]["hidden_states"]
        exact, theirs = (
            oracle.states(model("smollm2"), token_ids, "float64"),
            oracle.states(model("smollm2"), token_ids, "bfloat16"),
        )
        for place, layer in enumerate([2, 27, 15, 29]):
            noise = oracle.typical_error(theirs[layer], exact[layer])
            assert oracle.typical_error(states[:, place], exact[layer]) <= 2 * noise
            assert oracle.typical_error(states[:, place], exact[layer - 1]) > 5 * noise


def test_the_run_says_what_it_did(run):
    _rows, output, done = run
    record = json.loads((output / "run.json").read_text())
    assert record["complete"] is True
    assert "tokens/s" in done.stderr
    assert "MB/s" in done.stderr
    assert "1 samples cut" in done.stderr


def test_it_rehearsed_before_the_load(run):
    """The first layers of this very model, through the whole path."""
    *_, done = run
    said = re.search(r"rehearsal: (\d) of 30 layers, (\d+) samples of 1 to 256 tokens", done.stderr)
    assert said, done.stderr[-4000:]
    assert said.end() < done.stderr.index("all 12 samples are written")


def test_a_bad_line_is_named_before_the_model_loads(run, model, tmp_path):
    data = tmp_path / "bad.jsonl"
    data.write_text('{"input_ids": [5, 6]}\n{"input_ids": []}\n{"input_ids": [5, 99999999]}\n')
    command = ["-m", "vllm_compat.extract", "--model-path", str(model("smollm2")), "--prepared-data", str(data)]
    done = subprocess.run(
        [sys.executable, *command, "--output-dir", str(tmp_path / "out"), "--layer-ids", "2"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 4
    assert "line 2" in done.stderr
    assert "line 3" in done.stderr
    assert not list((tmp_path / "out").glob("hs_*"))
