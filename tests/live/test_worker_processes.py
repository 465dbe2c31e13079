"""Worker processes that are interrupted or killed in the middle of a run: what is said and kept, and how it goes on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import vllm_compat
from conftest import GPU_FLAGS, ON_GPU, engine_options, prompt, run, skip_if_faulty

SAMPLES = 1000


@pytest.fixture
def command(model, tmp_path):
    skip_if_faulty("tensor-parallel")
    if (torch.cuda.device_count() if ON_GPU else os.cpu_count() or 1) < 2:
        pytest.skip("two ranks want two GPUs, or two cores")
    rows = [{"input_ids": prompt(100, seed=n)} for n in range(SAMPLES)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = f"--model-path {model('llama')} --prepared-data {tmp_path / 'data.jsonl'} --output-dir {tmp_path / 'out'}"
    options += " --layer-ids 5 0 norm --batch-size 2 --max-seq-len 256 --tp-size 2 --dtype float32 --no-rehearsal"
    mp = ["--engine-option", 'distributed_executor_backend="mp"']
    return [sys.executable, "-m", "vllm_compat.extract", *options.split(), *mp, *GPU_FLAGS], tmp_path / "out"


def disturbed(command, disturb):
    """The exit code, what was said and how many files there are of a run that is disturbed once it has three."""
    arguments, folder = command
    log = folder.with_name("log")
    with log.open("wb") as err, subprocess.Popen(arguments, stderr=err, start_new_session=True) as process:
        try:
            end = time.monotonic() + 400
            while len(list(folder.glob("hs_*"))) < 3:
                assert process.poll() is None, log.read_text()[-4000:]
                assert time.monotonic() < end, log.read_text()[-4000:]
                time.sleep(0.01)
            disturb(process.pid)
            code = process.wait(120)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    done = len(list(folder.glob("hs_*")))
    assert 3 <= done < SAMPLES
    return code, log.read_text(), done


def goes_on(command):
    """The same command ends well; what it says."""
    arguments, folder = command
    again = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr[-4000:]
    record = json.loads((folder / "run.json").read_text())
    assert (record["complete"], record["summary"]["samples"]) == (True, SAMPLES)
    return again.stderr


def test_ctrl_c_finishes_what_is_under_way(command):
    """On a terminal it goes to the whole group, and would end the ranks that have to finish it."""
    code, said, done = disturbed(command, lambda pid: os.killpg(pid, signal.SIGINT))
    assert code == 75, said[-4000:]
    assert "SIGINT: finishing what is under way" in said
    assert "StepError" not in said, "it was finished, and not lost"
    assert f"{done} of {SAMPLES} samples are done" in said
    assert f"{done} samples are done already; {SAMPLES - done} are to be done" in goes_on(command)


def workers_of(pid):
    """The processes under a process, but for Python's own tracker of resources."""
    children = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout.split()
    return [int(i) for i in children if b"resource_tracker" not in Path(f"/proc/{i}/cmdline").read_bytes()]


def test_a_killed_worker_is_a_clear_error_and_the_same_command_goes_on(command):
    code, said, done = disturbed(command, lambda pid: os.kill(workers_of(pid)[-1], signal.SIGKILL))
    assert code == 75, said[-4000:]
    assert "StepError" in said
    assert "the same command goes on" in said
    goes_on(command)
    for index in (0, done - 1, done, SAMPLES - 1):
        tokens = load_file(command[1] / f"hs_{index}.safetensors")["token_ids"]
        assert tokens.tolist() == prompt(100, seed=index)


@pytest.mark.skipif(not ON_GPU, reason="vLLM runs no pipelines on a CPU")
def test_pipelines_are_refused_by_name_before_anything_is_loaded(model):
    if torch.cuda.device_count() < 2:
        pytest.skip("wants two GPUs")
    with pytest.raises(vllm_compat.UsageError, match="pipeline_parallel_size=2"):
        vllm_compat.open_engine(
            str(model("llama")),
            layer_ids=[1],
            **{**engine_options(), "tensor_parallel_size": 1, "pipeline_parallel_size": 2},
        )


@pytest.mark.skipif(not ON_GPU, reason="wants two devices")
def test_two_shards_on_two_gpus_seal_one_run(model, tmp_path):
    """Data parallel without a word between the processes."""
    if torch.cuda.device_count() < 2:
        pytest.skip("wants two GPUs")
    prompts = [prompt(5 + 7 * n, seed=n) for n in range(40)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in prompts))
    options = f"--model-path {model('llama')} --prepared-data {tmp_path / 'data.jsonl'} --output-dir {tmp_path / 'out'}"
    options += " --layer-ids 5 0 norm --batch-size 4 --max-seq-len 256 --dtype float32 --save-dtype float32"
    command = [sys.executable, "-m", "vllm_compat.extract", *options.split(), "--no-rehearsal", *GPU_FLAGS]
    processes = [
        subprocess.Popen(
            [*command, "--shard", f"{n}/2"],
            env=os.environ | {"CUDA_VISIBLE_DEVICES": str(n)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in range(2)
    ]
    said = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert (record["complete"], record["summary"]["samples"]) == (True, 40)
    with vllm_compat.open_engine(
        str(model("llama")), layer_ids=[5, 0, "norm"], **{**engine_options(), "tensor_parallel_size": 1}
    ) as engine:
        alone = run(engine, {str(n): ids[:256] for n, ids in enumerate(prompts)})
    for n in range(40):
        states = load_file(tmp_path / "out" / f"hs_{n}.safetensors")["hidden_states"]
        for place, layer in enumerate((5, 0, "norm")):
            wanted = alone[str(n)][layer]
            assert (states[:, place] - wanted).norm() < 2e-2 * wanted.norm()
