"""``--generate`` and ``stream``: the model's own answers, with the states of the very pass that made them."""

from __future__ import annotations

import json
import subprocess
import sys

import oracle
import pytest
from safetensors import safe_open

from conftest import FLOAT32_ERROR, RANKS, text
from vllm_compat.extract import ExtractConfig, stream
from vllm_compat.verify import VerifyConfig, verify

LAYERS = [2, 29, "norm"]
ANSWER = 9


@pytest.fixture(scope="module")
def prompts(model, tmp_path_factory):
    """A file of prompts, and their token ids."""
    ids = [text(model("smollm2"), n, topic) for n, topic in ((34, "bitwise"), (5, "comparisons"), (60, "strings"))]
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"input_ids": i}) + "\n" for i in ids))
    return path, ids


def check(folder, prompt, token_ids, loss_mask, sampled, states):
    """Against HF: the tokens by greedy sampling in float32, the states in float64."""
    assert [*token_ids, sampled] == oracle.greedy_whole(folder, prompt, ANSWER)
    assert list(loss_mask) == [0] * len(prompt) + [1] * (len(token_ids) - len(prompt))
    reference = oracle.states(folder, token_ids, "float64")
    errors = {layer: oracle.error(states[:, at], reference[layer]) for at, layer in enumerate(LAYERS)}
    assert max(errors.values()) < FLOAT32_ERROR, errors


def test_answers_in_files(model, prompts, tmp_path):
    path, ids = prompts
    folder = model("smollm2")
    command = (
        f"-m vllm_compat.extract --model-path {folder} --prepared-data {path} --output-dir {tmp_path / 'out'} "
        f"--layer-ids {' '.join(map(str, LAYERS))} --generate {ANSWER} --batch-size 2 --max-seq-len 200 "
        f"--dtype float32 --save-dtype float32"
    )
    done = subprocess.run([sys.executable, *command.split()], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    answered = 0
    for index, prompt in enumerate(ids):
        with safe_open(tmp_path / "out" / f"hs_{index}.safetensors", "pt") as file:
            tokens, mask = (file.get_tensor(name).tolist() for name in ("token_ids", "loss_mask"))
            states, sampled = file.get_tensor("hidden_states"), int(file.metadata()["sampled_token"])
        check(folder, prompt, tokens, mask, sampled, states)
        answered += len(tokens) + 1 - len(prompt)
    verdict = verify(VerifyConfig(tmp_path / "out"))
    assert (verdict.exit_code, verdict.scan.good) == (0, 3), verdict.first
    assert answered > 3 * 5
    assert [result.agree for result in verdict.self_checks] == [answered] * 2, "at the last layer and after the norm"


def test_answers_without_files(model, prompts):
    path, ids = prompts
    folder = model("smollm2")
    config = ExtractConfig(
        str(folder),
        path,
        layer_ids=tuple(LAYERS),
        batch_size=2,
        max_seq_len=200,
        tensor_parallel_size=RANKS,
        dtype="float32",
        save_dtype="auto",
        generate=ANSWER,
        engine_options={"enforce_eager": True},
    )
    found = {sample.index: sample for sample in stream(config)}
    assert sorted(found) == [0, 1, 2]
    for index, sample in found.items():
        sampled = int(sample.metadata["sampled_token"])
        check(folder, ids[index], sample.token_ids, sample.loss_mask, sampled, sample.hidden_states)
