"""A script that knows nothing of us, run with our generator in the place of speculators' own."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any

import models
import oracle
import pytest
import torch
from packaging.version import Version

from vllm_compat._detect.speculators import SpeculatorsRelease, find_speculators

HERE = Path(__file__).parent
FOUND = find_speculators(Version(version("speculators")))
assert FOUND is not None
RELEASE: SpeculatorsRelease = FOUND
LAYER_IDS = (2, 15, 27, 29)
FINAL = {"pre-norm": 29, "post-norm": "norm"}[RELEASE.formats["speculators-v1"]]
NUM_SAMPLES = 14
"""More than ten, of which speculators' own generator mixed up the order, and in one call."""


def conversations() -> list[dict[str, Any]]:
    """Real English of many lengths, one of them longer than is kept."""
    from pydoc_data.topics import topics

    texts = [" ".join(topics[name].split()) for name in sorted(topics)[:NUM_SAMPLES]]
    turns = [(f"What is this about? {t[: 40 + 23 * n]}", t[100 : 160 + 80 * n]) for n, t in enumerate(texts)]
    return [{"conversations": [{"from": "human", "value": a}, {"from": "gpt", "value": b}]} for a, b in turns]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.smollm2(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "conversations.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in conversations()))
    return path


def command(model: Path, data: Path, output: Path, *more: str) -> list[str]:
    """The script's own command line."""
    asked = ["--model", str(model), "--data", str(data), "--output", str(output), *more]
    return [str(HERE / "offline.py"), *asked, "--layer-ids", *map(str, LAYER_IDS)]


@pytest.fixture(scope="module")
def done(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """The run, with all samples in one call; its folder is the last argument but six."""
    output = tmp_path_factory.mktemp("run") / "states"
    script = command(model, data, output, "--batch-size", "99")
    run = [sys.executable, "-m", "vllm_compat.speculators", "run", *script]
    result = subprocess.run(run, capture_output=True, text=True, timeout=800, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    result.args = output
    return result


def samples(output: Path) -> list[dict[str, Any]]:
    return [torch.load(output / f"data_{n}.pt", weights_only=True) for n in range(NUM_SAMPLES)]


def test_each_sample_has_the_states_of_its_own_tokens(done: Any, model: Path) -> None:
    """No further from HF's exact states than twice what HF's own bfloat16 is; the nearest other layer is far off."""
    for sample in samples(done.args):
        token_ids = sample["input_ids"].tolist()
        exact, rounded = (oracle.states(model, token_ids, dtype) for dtype in ("float64", "bfloat16"))
        assert len(sample["hidden_states"]) == len(LAYER_IDS)
        for layer_id, found in zip((*LAYER_IDS[:-1], FINAL), sample["hidden_states"], strict=True):
            assert found.dtype == torch.bfloat16
            noise = oracle.typical_error(rounded[layer_id], exact[layer_id])
            assert oracle.typical_error(found, exact[layer_id]) < 2 * noise
            others = [oracle.typical_error(found, exact[k]) for k in exact if k != layer_id]
            assert min(others) > 4 * noise


def test_every_conversation_is_there_once_with_its_own_mask(done: Any, model: Path) -> None:
    """The mask covers the assistant's words and nothing else: a mask of another sample would not."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    answers = [row["conversations"][1]["value"] for row in conversations()]
    seen = []
    for sample in samples(done.args):
        assert len(sample["loss_mask"]) == len(sample["input_ids"])
        said = tokenizer.decode(sample["input_ids"][torch.as_tensor(sample["loss_mask"]).bool()]).strip()
        seen += [n for n, answer in enumerate(answers) if said and answer.strip().startswith(said[:30])]
    assert sorted(seen) == list(range(NUM_SAMPLES))


def test_the_releases_own_dataset_reads_it(done: Any) -> None:
    from trainer import numbers, open_files

    dataset = open_files(done.args, RELEASE)
    assert sorted(numbers(dataset)) == list(range(NUM_SAMPLES))
    kept = samples(done.args)
    for at, number in enumerate(numbers(dataset)):
        item, sample = dataset[at], kept[number]
        aux = torch.cat(sample["hidden_states"][:-1], dim=-1)
        assert torch.equal(item["hidden_states"].float(), aux[: len(item["hidden_states"])].float())
        last = item["verifier_last_hidden_states"].float()
        assert torch.equal(last, sample["hidden_states"][-1][-len(last) :].float())


def test_its_own_record_of_the_run_can_be_made(done: Any, model: Path) -> None:
    record = json.loads((done.args.parent / "data_config.json").read_text())
    assert record["hidden_states"]["layer_ids"] == list(LAYER_IDS)
    assert record["model"]["target_model_path"] == str(model)
    assert record["model"]["gpu_memory_utilization"] == 0.5


def test_what_would_have_failed_is_said_first(done: Any, model: Path, data: Path, tmp_path: Path) -> None:
    """And it does: the same command without us ends in an error, and writes nothing."""
    said = done.stderr[done.stderr.index("vllm_compat: for this run") :]
    assert said.startswith(f"vllm_compat: for this run the generator of speculators {RELEASE.version} is ours.")
    output = tmp_path / "states"
    alone = subprocess.run(
        [sys.executable, *command(model, data, output)], capture_output=True, text=True, timeout=800, check=False
    )
    assert alone.returncode != 0
    assert not list(output.glob("data_*"))
    print(alone.stderr[-600:])


def test_nothing_installed_was_touched(done: Any) -> None:
    """Every file of speculators still has the digest that its wheel came with."""
    checked = 0
    for file in distribution("speculators").files or ():
        if file.hash is not None:
            digest = hashlib.new(file.hash.mode, Path(file.locate()).read_bytes()).digest()
            assert base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == file.hash.value, file
            checked += 1
    assert checked > 40
