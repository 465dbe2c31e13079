"""Rows belong to their requests, whatever the batch looks like; and the layers come as they were asked for."""

from __future__ import annotations

import random

import oracle
import pytest

from conftest import FLOAT32_ERROR, prompt, run
from vllm_compat._stacked import stacked

LAYERS = [5, 0, 3]


@pytest.fixture(params=[4096, 64], ids=["whole", "pieces"], scope="module")
def engine(request, open_engine):
    """The same engine twice: prompts whole, and cut by a budget of 64 tokens."""
    return open_engine("llama", layer_ids=LAYERS, max_num_batched_tokens=request.param)


def check(captured, prompts, folder, outputs_expected=1):
    for request_id, token_ids in prompts.items():
        states = captured[request_id]
        assert states.token_ids == tuple(token_ids)
        assert states.num_prompt_tokens == len(token_ids)
        assert states.layer_ids == tuple(LAYERS)
        reference = oracle.states(folder, token_ids)
        for layer, tensor in zip(LAYERS, states.hidden_states, strict=True):
            assert tensor.shape == (len(token_ids), 128)
            assert oracle.error(tensor, reference[layer]) < FLOAT32_ERROR, (request_id, layer)


def test_33_prompts_at_once_of_1_to_300_tokens(engine, model):
    lengths = [*random.Random(0).sample(range(2, 300), 31), 1, 300]
    prompts = {f"id {n}": prompt(length, seed=n) for n, length in enumerate(lengths)}
    check(run(engine, prompts), prompts, model("llama"))


def test_12_prompts_keep_their_names(engine, model):
    """Sorted as text, "2" comes after "10": results joined by position would swap them."""
    prompts = {str(n): prompt(5 + n, seed=n) for n in range(12)}
    captured = run(engine, prompts)
    check(captured, prompts, model("llama"))
    assert captured["2"].token_ids != captured["10"].token_ids


def test_the_same_prompt_twice_gives_the_same_states_twice(engine, model):
    prompts = {"a": prompt(40, seed=7), "b": prompt(40, seed=7)}
    captured = run(engine, prompts)
    check(captured, prompts, model("llama"))
    for one, other in zip(captured["a"].hidden_states, captured["b"].hidden_states, strict=True):
        assert oracle.error(one, other) < FLOAT32_ERROR


def test_requests_that_join_and_leave_while_others_run(engine, model):
    """The places of finished requests are taken by later ones, with answers of 1 to 6 tokens under way."""
    chooser = random.Random(3)
    lengths = {f"j{n}": chooser.randint(1, 120) for n in range(20)}
    prompts = {i: prompt(n, seed=n) for i, n in lengths.items()}
    waiting = list(prompts.items())
    captured = {}
    while waiting or engine.has_unfinished:
        for request_id, token_ids in [waiting.pop() for _ in range(min(3, len(waiting)))]:
            engine.make_request(token_ids, request_id=request_id, max_tokens=chooser.randint(1, 6), ignore_eos=True)
        engine.run_step()
        captured |= {s.request_id: s for s in engine.get_captured_states()}
    assert captured.keys() == prompts.keys()
    for request_id, states in captured.items():
        assert states.token_ids == (*prompts[request_id], *states.output_token_ids[:-1])
        reference = oracle.states(model("llama"), states.token_ids)
        assert oracle.error(states[5], reference[5]) < FLOAT32_ERROR


def test_captured_order_is_that_of_making(engine):
    prompts = {f"o{n}": prompt(length, seed=n) for n, length in enumerate((200, 3, 90, 1, 40))}
    for request_id, token_ids in prompts.items():
        engine.make_request(token_ids, request_id=request_id)
    while engine.has_unfinished:
        engine.run_step()
    assert [s.request_id for s in engine.get_captured_states()] == list(prompts)
    assert engine.get_captured_states() == []


def test_without_waiting_each_request_s_states_come_once_and_are_the_same(engine):
    """On a device they come a step later; their rows are taken out of the last pass while the next one runs."""
    prompts = {f"w{n}": prompt(length, seed=n) for n, length in enumerate((100, 3, 64, 1, 65, 40, 130))}
    waited = run(engine, prompts, max_tokens=3, ignore_eos=True)
    waiting, captured = list(prompts.items()), {}
    while waiting or engine.has_unfinished:
        for request_id, token_ids in [waiting.pop(0) for _ in range(min(2, len(waiting)))]:
            engine.make_request(token_ids, request_id=request_id, max_tokens=3, ignore_eos=True)
        engine.run_step()
        for states in engine.get_captured_states(wait=False):
            assert states.request_id not in captured
            captured[states.request_id] = states
    for states in engine.get_captured_states():
        assert states.request_id not in captured
        captured[states.request_id] = states
    assert captured.keys() == prompts.keys()
    for request_id, states in captured.items():
        assert states.token_ids == waited[request_id].token_ids
        for one, other in zip(states.hidden_states, waited[request_id].hidden_states, strict=True):
            assert oracle.error(one, other.float()) < FLOAT32_ERROR


def test_states_are_ordinary_tensors(engine):
    """A trainer must be able to use them: on the CPU, no inference tensors, no view of a whole batch."""
    captured = run(engine, {"a": prompt(3, seed=0), "b": prompt(300, seed=0)})
    whole = stacked(captured["a"].hidden_states)
    assert whole.shape == (3, len(LAYERS), 128)
    assert whole.untyped_storage().nbytes() == whole.numel() * whole.element_size()
    for tensor in captured["a"].hidden_states:
        assert tensor.device.type == "cpu"
        assert not tensor.is_inference()
        (tensor.clone().requires_grad_() * 2).sum().backward()
