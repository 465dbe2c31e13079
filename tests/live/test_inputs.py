"""Conversations in a gzip file, made into tokens by a real tokenizer and template; two are the same, one too long."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys

import pytest
from safetensors import safe_open

from conftest import ON_GPU

KEPT = 120
ASK = [{"role": "user", "content": "Name a prime number."}]
CHATS = [
    [*ASK, {"role": "assistant", "content": "Seven."}],
    [{"role": "system", "content": "Be brief."}, *ASK, {"role": "assistant", "content": "2"}, *ASK],
    [*ASK, {"role": "assistant", "content": "Seven is one, and there is no largest of them. " * 20}],
    [*ASK, {"role": "assistant", "content": "Seven."}],
]


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    """The output folder of one run, and what it printed; the summary is its last line."""
    folder = tmp_path_factory.mktemp("inputs")
    data, output = folder / "chats", folder / "states"
    with gzip.open(data, "wt", encoding="utf-8", newline="\r\n") as file:
        for number, chat in enumerate(CHATS):
            file.write(json.dumps({"id": f"chat {number}", "messages": chat}) + "\n")
    command = (
        f"-m vllm_compat.extract --model-path {model('smollm2')} --prepared-data {data} --output-dir {output} "
        f"--batch-size 2 --max-seq-len {KEPT} --overlong skip --layer-ids 2 27 15 29 --dtype float32 "
        "--save-dtype float32 --no-rehearsal --json"
    )
    done = subprocess.run([sys.executable, *command.split()], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return output, done


def read(output, index):
    with safe_open(output / f"hs_{index}.safetensors", "pt") as file:
        return {k: file.get_tensor(k) for k in file.keys()}, file.metadata()  # noqa: SIM118


def test_tokens_and_masks_are_those_of_the_models_template(run, model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model("smollm2"))
    spoken = {0: "Seven.<|im_end|>\n", 1: "2<|im_end|>\n", 3: "Seven.<|im_end|>\n"}
    for index, text in spoken.items():
        tensors, metadata = read(run[0], index)
        ids, mask = tensors["token_ids"].tolist(), tensors["loss_mask"].tolist()
        assert tokenizer.decode(ids) == tokenizer.apply_chat_template(CHATS[index], tokenize=False)
        assert tokenizer.decode([token for token, on in zip(ids, mask, strict=True) if on]) == text
        assert metadata["sample_id"] == f"chat {index}"


def test_the_same_conversation_is_computed_once_and_the_long_one_left_out(run):
    output, done = run
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["samples"], summary["skipped"], summary["overlong"], summary["copied"]) == (4, 1, 1, 1)
    assert "1 samples were made from files with the same tokens" in done.stderr
    record = json.loads((output / "run.json").read_text())
    assert [skipped["index"] for skipped in record["skipped"]] == [2]
    assert "and the limit is 120" in record["skipped"][0]["why"]
    first, copy = read(output, 0), read(output, 3)
    assert first[0]["hidden_states"].equal(copy[0]["hidden_states"])
    assert {**first[1], "index": "3", "sample_id": "chat 3"} == copy[1]
    assert not (output / "hs_2.safetensors").exists()


def test_verify_reads_the_same_input_and_computes_again(run, model):
    command = f"-m vllm_compat verify {run[0]} --model {model('smollm2')} --samples 3"
    done = subprocess.run([sys.executable, *command.split()], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tokens, loss masks and ids compared" in done.stdout
    if not ON_GPU:
        assert "GOOD: all 4 samples" in done.stdout
