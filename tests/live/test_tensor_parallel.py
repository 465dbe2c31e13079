"""Two tensor-parallel ranks: the multiproc executor on every release."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import oracle
import pytest
import torch

from conftest import FLOAT32_ERROR, GPU_FLAGS, ON_GPU, prompt, run, skip_if_faulty

LAYERS = [5, 0, "norm"]
SAMPLES = 1000
PROMPTS = {f"t{n}": prompt(length, seed=n) for n, length in enumerate((1, 90, 7, 200, 33))}


@pytest.fixture(scope="module")
def two_ranks():
    """Whether there may be two."""
    skip_if_faulty("tensor-parallel")
    ranks = torch.cuda.device_count() if ON_GPU else os.cpu_count() or 1
    if ranks < 2:
        pytest.skip("two ranks want two GPUs, or two cores")


@pytest.fixture
def command(two_ranks, model, tmp_path):
    """An extraction by two ranks that takes a while, and its folder."""
    rows = [{"input_ids": prompt(100, seed=n)} for n in range(SAMPLES)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = f"--model-path {model('llama')} --prepared-data {tmp_path / 'data.jsonl'} --output-dir {tmp_path / 'out'}"
    options += " --layer-ids 5 0 norm --batch-size 2 --max-seq-len 256 --tp-size 2 --dtype float32 --no-rehearsal"
    mp = ["--engine-option", 'distributed_executor_backend="mp"']
    return [sys.executable, "-m", "vllm_compat.extract", *options.split(), *mp, *GPU_FLAGS], tmp_path / "out"


def test_ctrl_c_finishes_what_is_under_way(command, tmp_path):
    """On a terminal it goes to the whole group, and would end the ranks that have to finish it.

    The first test here: the ranks of an engine that is open keep two cores busy while they wait.
    """
    arguments, folder = command
    log = tmp_path / "log"
    with log.open("wb") as err, subprocess.Popen(arguments, stderr=err, start_new_session=True) as process:
        try:
            end = time.monotonic() + 400
            while len(list(folder.glob("hs_*"))) < 3:
                assert process.poll() is None, log.read_text()[-4000:]
                assert time.monotonic() < end, log.read_text()[-4000:]
                time.sleep(0.01)
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(120) == 75, log.read_text()[-4000:]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    said = log.read_text()
    assert "SIGINT: finishing what is under way" in said
    assert "StepError" not in said, "it was finished, and not lost"
    done = len(list(folder.glob("hs_*")))
    assert 3 <= done < SAMPLES
    assert f"{done} of {SAMPLES} samples are done" in said
    again = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr[-4000:]
    assert f"{done} samples are done already; {SAMPLES - done} are to be done" in again.stderr
    assert json.loads((folder / "run.json").read_text())["complete"] is True


@pytest.fixture(scope="module")
def one_rank(two_ranks, open_engine):
    """The states of one rank, whose engine is closed before two are opened."""
    return run(open_engine("llama", layer_ids=LAYERS, tensor_parallel_size=1, max_num_batched_tokens=64), PROMPTS)


@pytest.fixture(scope="module")
def engine(one_rank, open_engine):
    return open_engine(
        "llama", layer_ids=LAYERS, tensor_parallel_size=2, max_num_batched_tokens=64, distributed_executor_backend="mp"
    )


def test_two_ranks_give_the_states_of_one(engine, one_rank):
    for request_id, captured in run(engine, PROMPTS).items():
        for layer in LAYERS:
            assert oracle.error(captured[layer], one_rank[request_id][layer].float()) < FLOAT32_ERROR


def test_states_are_whole_and_hf_float32(engine, model):
    for request_id, captured in run(engine, PROMPTS, max_tokens=3, ignore_eos=True).items():
        reference = oracle.states(model("llama"), captured.token_ids)
        for layer in LAYERS:
            assert captured[layer].shape == (len(PROMPTS[request_id]) + 2, 128)
            assert oracle.error(captured[layer], reference[layer]) < FLOAT32_ERROR


def test_each_rank_captures_its_share_and_lends_it(engine):
    """Nothing large goes through a reply; the memory is used again."""
    borrowed = set()
    for n in range(6):
        captured = run(engine, {f"{n} {i}": prompt(200, seed=10 * n + i) for i in range(4)})
        borrowed |= engine._capture._borrower._mappings.keys()
        del captured
    assert len({worker for worker, _ in borrowed}) == 2, "both ranks lend"
    assert len(borrowed) <= 12
    assert engine._executor.collective_rpc(rows_kept) == [0, 0]


def rows_kept(worker):
    """Run in each worker."""
    return len(worker.vllm_compat_tap._rows)


def test_states_outlive_the_engine_and_its_workers(engine):
    captured = run(engine, {"last": prompt(200, seed=99)})["last"]
    copies = [tensor.clone() for tensor in captured.hidden_states]
    engine.close()
    for tensor, copy in zip(captured.hidden_states, copies, strict=True):
        assert torch.equal(tensor, copy)
