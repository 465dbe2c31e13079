"""Capturing with prefix caching: what requests begin with alike is forwarded once, and is in the states of each."""

from __future__ import annotations

import random

import oracle
import pytest

import vllm_compat
from conftest import FLOAT32_ERROR, ON_GPU, prompt, run

LAYERS = [5, 0, "norm"]


@pytest.fixture(scope="module", params=[4096, 64], ids=["whole", "pieces"])
def engine(request, open_engine):
    return open_engine(
        "llama", layer_ids=LAYERS, enable_prefix_caching=True, max_num_batched_tokens=request.param, block_size=16
    ) if ON_GPU else open_engine(
        "llama", layer_ids=LAYERS, enable_prefix_caching=True, max_num_batched_tokens=request.param
    )  # fmt: skip


def captured_and_forwarded(engine, prompts, **options):
    """Request id -> states; and how many tokens were forwarded for all of them."""
    for request_id, token_ids in prompts.items():
        engine.make_request(token_ids, request_id=request_id, **options)
    captured, forwarded = {}, 0
    while engine.has_unfinished:
        forwarded += sum(engine.run_step().num_scheduled_tokens.values())
        captured |= {states.request_id: states for states in engine.get_captured_states()}
    assert captured.keys() == prompts.keys()
    return captured, forwarded


def check(captured, prompts, model):
    for request_id, token_ids in prompts.items():
        states = captured[request_id]
        assert states.token_ids[: len(token_ids)] == tuple(token_ids)
        reference = oracle.states(model("llama"), states.token_ids)
        for layer in LAYERS:
            assert states[layer].shape == (len(states.token_ids), 128)
            assert oracle.error(states[layer], reference[layer]) < FLOAT32_ERROR, (request_id, layer)


def test_a_shared_beginning_is_forwarded_once(engine, model):
    """In one step and over many; twelve that share 256 tokens, one of which is all of another."""
    start = prompt(256, seed=1)
    prompts = {f"s{n}": start + prompt(1 + 17 * n, seed=100 + n) for n in range(11)} | {"all": list(start)}
    captured, forwarded = captured_and_forwarded(engine, prompts)
    check(captured, prompts, model)
    total = sum(map(len, prompts.values()))
    assert total - 11 * 256 <= forwarded < total - 9 * 128  # blocks may be as large as 128 tokens on a CPU


def test_the_turns_of_a_conversation(engine, model):
    """Each begins with all of the one before it; in an order of their own."""
    turns = [prompt(480, seed=5)[:length] for length in (130, 200, 270, 340, 410, 480)]
    prompts = {f"turn {len(t)}": t for t in random.Random(2).sample(turns, len(turns))}
    check(captured_and_forwarded(engine, prompts)[0], prompts, model)


def test_what_was_asked_in_earlier_calls_is_still_known(engine, model):
    start = prompt(300, seed=7)
    first = {"first": [*start, 9, 9, 9]}
    check(captured_and_forwarded(engine, first)[0], first, model)
    second = {"first": [*start, 8, 8], "second": start + prompt(40, seed=8)}  # an id that was used before
    captured, forwarded = captured_and_forwarded(engine, second)
    check(captured, second, model)
    assert forwarded < sum(map(len, second.values())) - 2 * 128


def test_answers_are_beginnings_too(engine, model):
    """A second turn begins with the first one's prompt and the answer that the model gave to it."""
    prompts = {"one": prompt(200, seed=11)}
    captured, _ = captured_and_forwarded(engine, prompts, max_tokens=90, ignore_eos=True)
    check(captured, prompts, model)
    said = [*captured["one"].token_ids, captured["one"].output_token_ids[-1]]
    again = {"two": [*said, *prompt(60, seed=12)]}
    check(captured_and_forwarded(engine, again)[0], again, model)


def test_an_aborted_request_leaves_its_rows_to_others(engine, model):
    start = prompt(400, seed=13)
    engine.make_request(start, request_id="gone", max_tokens=50, ignore_eos=True)
    engine.run_step()
    engine.abort("gone")
    prompts = {"stays": [*start, 3, 4, 5]}
    check(captured_and_forwarded(engine, prompts)[0], prompts, model)


def test_memory_for_shared_rows_is_bounded(open_engine, model):
    """Room for 400 tokens: older rows are forgotten, what begins with them is forwarded anew, and all is right."""
    engine = open_engine("llama", layer_ids=LAYERS, enable_prefix_caching=True, shared_states_bytes=400 * 3 * 128 * 4)
    start = prompt(256, seed=21)
    chooser = random.Random(5)
    for call in range(6):
        prompts = {f"m{n}": start[: chooser.choice((128, 256))] + prompt(30 + n, seed=call) for n in range(4)}
        check(captured_and_forwarded(engine, prompts)[0], prompts, model)
    kept = engine._executor.collective_rpc(rows_kept)
    assert max(kept) <= 3 * 400 + 300, "two epochs, and what is under way"


def rows_kept(worker):
    """Run in the worker: rows that are there for others."""
    tap = worker.vllm_compat_tap
    return sum(len(entry.rows) for entry in tap._shared._entries.values()) if tap else 0


def test_the_same_without_sharing(open_engine, model):
    """The control: every token is forwarded."""
    engine = open_engine("llama", layer_ids=LAYERS)
    start = prompt(256, seed=1)
    prompts = {f"s{n}": start + prompt(1 + 17 * n, seed=100 + n) for n in range(3)}
    captured, forwarded = captured_and_forwarded(engine, prompts)
    check(captured, prompts, model)
    assert forwarded == sum(map(len, prompts.values()))


def test_an_engine_of_the_callers_own_cannot_share(open_engine):
    """Requests of others would put blocks into its cache whose rows nobody kept."""
    core = open_engine("llama", enable_prefix_caching=True)
    with pytest.raises(vllm_compat.AttachError, match="prefix caching is on"):
        vllm_compat.attach(scheduler=core._scheduler, executor=core._executor, layer_ids=[0])
    assert len(run(core, {"mine": prompt(6, seed=3)})["mine"].output_token_ids) == 1


def test_a_cache_that_is_too_small_for_all(open_engine, model):
    """Requests are put off in the middle of their answers, and begin again with what the cache still has."""
    small = {"num_gpu_blocks_override": 9, "block_size": 128}
    engine = open_engine("llama", layer_ids=LAYERS, enable_prefix_caching=True, **small)
    blocks = engine._scheduler.kv_cache_manager.block_pool.num_gpu_blocks
    size = engine._scheduler.cache_config.block_size
    preempted = []
    if own := getattr(engine._scheduler, "_preempt_request", None):  # a method of its own from 0.12 on

        def preempt(request, *arguments, **named):
            preempted.append(request)
            return own(request, *arguments, **named)

        engine._scheduler._preempt_request = preempt
    start = prompt(size, seed=31)
    prompts = {f"k{n}": start[: size // (1 + n % 2)] + prompt(size // 2 + n, seed=n) for n in range(8)}
    captured, _ = captured_and_forwarded(engine, prompts, max_tokens=size, ignore_eos=True)
    check(captured, prompts, model)
    assert blocks == 9
    assert preempted or not own, "the cache was not too small"
