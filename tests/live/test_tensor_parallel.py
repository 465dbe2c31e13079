"""Two tensor-parallel ranks: the multiproc executor on every release."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil

import oracle
import pytest
import torch
import zmq

import vllm_compat
from conftest import FLOAT32_ERROR, ON_GPU, engine_options, prompt, run, skip_if_faulty

LAYERS = [5, 0, "norm"]
PROMPTS = {f"t{n}": prompt(length, seed=n) for n, length in enumerate((1, 90, 7, 200, 33))}


@pytest.fixture(scope="module")
def two_ranks():
    """Whether there may be two."""
    skip_if_faulty("tensor-parallel")
    ranks = torch.cuda.device_count() if ON_GPU else os.cpu_count() or 1
    if ranks < 2:
        pytest.skip("two ranks want two GPUs, or two cores")


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


@pytest.mark.parametrize("fails", ["load_model", "_initialize_kv_caches"])
def test_an_engine_that_does_not_start_leaves_no_worker(two_ranks, model, fails, monkeypatch, tmp_path):
    """Workers that fail, and an engine that fails when they are up, as without room for the KV cache."""
    from vllm.v1.engine.core import EngineCore

    folder, message = str(model("llama")), "initialization failed"
    if fails == "load_model":
        shutil.copy(model("llama") / "config.json", folder := str(tmp_path))
    else:
        message = "no room, on purpose"
        monkeypatch.setattr(EngineCore, fails, no_room)
    options = {**engine_options(), "tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with pytest.raises(Exception, match=message):
        vllm_compat.open_engine(folder, layer_ids=LAYERS, **options)
    assert [process.name for process in multiprocessing.active_children() if "Worker" in process.name] == []
    assert not [item for item in gc.get_objects() if isinstance(item, zmq.Socket) and not item.closed]


def no_room(*args, **kwargs):
    raise RuntimeError("no room, on purpose")
