"""The drop-in for speculators' generator: the cases of its own tests, and of the reports on it, on the real engine."""

from __future__ import annotations

import oracle
import pytest
import torch

import vllm_compat
from conftest import FLOAT32_ERROR, engine_options, prompt, text
from vllm_compat.speculators import VllmHiddenStatesGenerator

TOPICS = ("bitwise", "booleans", "for", "if", "while", "lists", "power", "yield")  # a text of Python's own for each


@pytest.fixture(scope="module")
def make(model):
    """``make("llama", ...)``: one generator at a time, kept while the same one is asked for again."""
    now = {}

    def make_or_reuse(name, **arguments):
        key = (name, repr(sorted(arguments.items())))
        if now.get("key") != key:
            end()
            now.update(key=key, generator=VllmHiddenStatesGenerator(str(model(name)), **engine_options(), **arguments))
        return now["generator"]

    def end():
        if now:
            now.pop("generator").close()
            now.clear()

    yield make_or_reuse
    end()


@pytest.fixture
def trained(make):
    """SmolLM2 under a budget of 100 tokens, so that eight texts are run in several pieces."""
    return make("smollm2", max_num_batched_tokens=100)


@pytest.fixture
def tiny(make):
    """Layers out of order and one twice, prompts cut by a budget of 64 tokens."""
    return make("llama", layer_ids=[5, 0, 3, 0], max_num_batched_tokens=64)


def worst(result, reference, layer_ids):
    """The greatest error of any token of any layer; the order of the layers is that of ``layer_ids``."""
    assert len(result["hidden_states"]) == len(layer_ids)
    return max(oracle.error(h, reference[k]) for h, k in zip(result["hidden_states"], layer_ids, strict=True))


def test_default_layers_are_hf(trained, model):
    """Two prompts padded to one length, as one tensor: padding is forwarded like any other token."""
    folder = model("smollm2")
    ids = [text(folder, 21, "bitwise"), [*text(folder, 17, "booleans"), *[2] * 4]]
    results = trained.generate(torch.tensor(ids))
    assert trained.layer_ids == [2, 15, 27, 29]
    assert trained.final_state == "pre-norm"
    for token_ids, result in zip(ids, results, strict=True):
        assert result.keys() == {"input_ids", "hidden_states", "loss_mask"}
        assert result["input_ids"].tolist() == token_ids
        assert result["input_ids"].dtype == torch.long
        assert result["loss_mask"] is None
        assert worst(result, oracle.states(folder, token_ids, "float64"), trained.layer_ids) < FLOAT32_ERROR


def test_a_batch_is_what_its_prompts_are_alone(trained, model):
    """Nothing of another prompt, of an earlier call or of an earlier piece is left in a result."""
    ids = [text(model("smollm2"), 9 + 7 * n, topic) for n, topic in enumerate(TOPICS)]
    alone = [trained.generate([one])[0] for one in ids]
    for _ in range(2):
        for token_ids, one, other in zip(ids, alone, trained.generate(ids), strict=True):
            assert other["input_ids"].tolist() == token_ids
            for a, b in zip(one["hidden_states"], other["hidden_states"], strict=True):
                assert oracle.error(b, a) < FLOAT32_ERROR


def test_forty_prompts_keep_their_order_and_layers(tiny, model):
    """More than the 32 that speculators could take, and than the 10 that it kept in order; the longest is cut up."""
    ids = [prompt(1 + 37 * n % 290, seed=n) for n in range(40)]
    for token_ids, result in zip(ids, tiny.generate(ids), strict=True):
        assert result["input_ids"].tolist() == token_ids
        assert worst(result, oracle.states(model("llama"), token_ids), [5, 0, 3, 0]) < FLOAT32_ERROR


def test_results_can_be_saved_one_by_one(tiny, tmp_path):
    """A view would bring the memory of all layers with it into the file of each."""
    (result,) = tiny.generate([prompt(100, seed=5)])
    for hidden_states in result["hidden_states"]:
        assert hidden_states.is_contiguous()
        assert hidden_states.device.type == "cpu"
        assert hidden_states.untyped_storage().nbytes() == hidden_states.numel() * hidden_states.element_size()
    torch.save(result, tmp_path / "data_0.pt")
    loaded = torch.load(tmp_path / "data_0.pt", weights_only=True)
    assert torch.equal(loaded["hidden_states"][0], result["hidden_states"][0])


def test_a_prompt_too_long_is_cut_and_that_is_said(tiny, caplog, model):
    whole = prompt(600, seed=6)
    with caplog.at_level("WARNING", "vllm_compat"):
        long, short = tiny.generate([whole, torch.tensor([5, 6, 7])])
    assert long["input_ids"].tolist() == whole[:511]
    assert short["input_ids"].tolist() == [5, 6, 7]
    assert "1 of 2 prompts are cut to their first 511 tokens" in caplog.text
    assert worst(long, oracle.states(model("llama"), whole[:511]), [5, 0, 3, 0]) < FLOAT32_ERROR


@pytest.mark.parametrize("bad", [[[5, 6], []], [[5, 6], [512]], [[5, 6], [-1]], []], ids=str)
def test_bad_prompts_are_refused_and_the_next_call_is_right(tiny, model, bad):
    with pytest.raises(ValueError, match="token"):
        tiny.generate(bad)
    (result,) = tiny.generate([[5, 6]])
    assert worst(result, oracle.states(model("llama"), [5, 6]), [5, 0, 3, 0]) < FLOAT32_ERROR


def test_an_interrupted_call_leaves_nothing_to_the_next(tiny, model, monkeypatch):
    steps = iter(range(9))
    run_step = tiny._engine.run_step

    def interrupted():
        if next(steps) == 2:
            raise KeyboardInterrupt
        return run_step()

    with monkeypatch.context() as patch:
        patch.setattr(tiny._engine, "run_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tiny.generate([prompt(10, seed=1), prompt(400, seed=2)])
    token_ids = prompt(70, seed=3)
    (result,) = tiny.generate([token_ids])
    assert worst(result, oracle.states(model("llama"), token_ids), [5, 0, 3, 0]) < FLOAT32_ERROR


def test_the_state_after_the_norm_for_trainers_without_one(make, model):
    generator = make("llama", layer_ids=[1, 5], final_state="post-norm")
    token_ids = prompt(20, seed=9)
    (result,) = generator.generate([token_ids])
    assert generator.layer_ids == [1, 5]
    assert worst(result, oracle.states(model("llama"), token_ids), [1, "norm"]) < FLOAT32_ERROR


@pytest.mark.parametrize("layer_ids", [[6], [-1], [], ["norm"], [True]], ids=str)
def test_a_layer_that_is_not_there_is_refused_before_anything_is_loaded(model, layer_ids):
    with pytest.raises(vllm_compat.UsageError, match=r"out of bounds|cannot be empty"):
        VllmHiddenStatesGenerator(str(model("llama")), layer_ids=layer_ids)
