"""Two tensor-parallel ranks: the multiproc executor on every release."""

from __future__ import annotations

import os

import oracle
import pytest
import torch
from conftest import FLOAT32_ERROR, ON_GPU, prompt, run, skip_if_faulty

LAYERS = [5, 0, "norm"]


@pytest.fixture(scope="module")
def engine(open_engine):
    skip_if_faulty("tensor-parallel")
    ranks = torch.cuda.device_count() if ON_GPU else os.cpu_count() or 1
    if ranks < 2:
        pytest.skip("two ranks want two GPUs, or two cores")
    return open_engine(
        "llama", layer_ids=LAYERS, tensor_parallel_size=2, max_num_batched_tokens=64, distributed_executor_backend="mp"
    )


def test_states_are_whole_and_hf_float32(engine, model):
    prompts = {f"t{n}": prompt(length, seed=n) for n, length in enumerate((1, 90, 7, 200, 33))}
    for request_id, captured in run(engine, prompts, max_tokens=3, ignore_eos=True).items():
        reference = oracle.states(model("llama"), captured.token_ids)
        for layer in LAYERS:
            assert captured[layer].shape == (len(prompts[request_id]) + 2, 128)
            assert oracle.error(captured[layer], reference[layer]) < FLOAT32_ERROR


def test_one_rank_captures(engine):
    assert sorted(engine._executor.collective_rpc(has_tap)) == [False, True]


def has_tap(worker):
    """Run in each worker."""
    return worker.vllm_compat_tap is not None
