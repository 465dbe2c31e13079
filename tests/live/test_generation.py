"""Answers: prompt, response and states in one pass."""

from __future__ import annotations

import oracle

from conftest import FLOAT32_ERROR, prompt, run, text


def test_the_answer_is_hf_greedy_and_its_rows_come_too(open_engine, model):
    """The last sampled token was never forwarded, so it has no row."""
    engine = open_engine("smollm2", layer_ids=[3, 29])
    token_ids = text(model("smollm2"), 20)
    states = run(engine, {"a": token_ids}, max_tokens=8, ignore_eos=True)["a"]
    assert list(states.output_token_ids) == oracle.greedy(model("smollm2"), token_ids, 8)
    assert states.token_ids == (*token_ids, *states.output_token_ids[:-1])
    assert states.num_prompt_tokens == 20
    assert states.finish_reason == "length"
    reference = oracle.states(model("smollm2"), states.token_ids, "float64")
    for layer in (3, 29):
        assert states[layer].shape == (27, 576)
        assert oracle.error(states[layer], reference[layer]) < FLOAT32_ERROR


def test_an_answer_ends_where_the_model_ends_it(open_engine):
    """The end token comes from the model's own config; here the second token that it samples is named as one."""
    engine = open_engine("smollm2", layer_ids=[3, 29])
    token_ids = prompt(20, seed=5, vocab=49152)
    free = run(engine, {"free": token_ids}, max_tokens=6, ignore_eos=True)["free"]
    end = free.output_token_ids[1]
    stopped = run(engine, {"stopped": token_ids}, max_tokens=6, sampling={"stop_token_ids": [end]})["stopped"]
    assert stopped.finish_reason == "stop"
    assert stopped.output_token_ids == free.output_token_ids[: free.output_token_ids.index(end) + 1]
    assert len(stopped.token_ids) == 20 + len(stopped.output_token_ids) - 1


def test_the_end_token_of_a_chat_model(open_engine, model):
    """SmolLM2 answers a question and stops by itself."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model("smollm2"))
    chat = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    engine = open_engine("smollm2", layer_ids=[3, 29])
    states = run(engine, {"q": tokenizer(chat)["input_ids"]}, max_tokens=40)["q"]
    assert "Paris" in tokenizer.decode(states.output_token_ids)
    assert states.finish_reason == "stop"
    assert tokenizer.decode(states.output_token_ids[-1:]) == "<|im_end|>"


def test_sampled_answers_are_told_by_their_seed(open_engine):
    engine = open_engine("smollm2", layer_ids=[3, 29])
    token_ids = prompt(20, seed=6, vocab=49152)
    sampling = {"temperature": 1.0, "seed": 11}
    one = run(engine, {"one": token_ids}, max_tokens=6, ignore_eos=True, sampling=sampling)["one"]
    two = run(engine, {"two": token_ids}, max_tokens=6, ignore_eos=True, sampling=sampling)["two"]
    other = run(engine, {"x": token_ids}, max_tokens=6, ignore_eos=True, sampling={"temperature": 1.0, "seed": 12})["x"]
    assert one.output_token_ids == two.output_token_ids != other.output_token_ids
