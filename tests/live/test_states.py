"""Every layer's states against HF, model by model."""

from __future__ import annotations

import oracle
import pytest

from conftest import FAULTS, FLOAT32_ERROR, prompt, run, skip_if_faulty, text
from vllm_compat import detect

PLAIN_OPS = {"compilation_config": {"custom_ops": ["none"]}}
# The fault of a release's own compiled kernels that a model meets; plain operations are then right.
MODELS = {"llama": "", "qwen3": "rms-norm", "gemma": "", "gpt2": "", "deepseek_v3": "deepseek-rotary"}


@pytest.fixture(params=MODELS, scope="module")
def tapped(request, open_engine, model):
    """A model's folder, and an engine that captures all of it, under a budget that cuts prompts into pieces."""
    name = request.param
    if name == "deepseek_v3":
        skip_if_faulty("deepseek-build", "experts", "experts-amx")
    layers = [*range(4 if name == "deepseek_v3" else 6), "norm"]
    plain = PLAIN_OPS if MODELS[name] in FAULTS else {}
    return model(name), open_engine(name, layer_ids=layers, max_num_batched_tokens=64, **plain)


def test_every_layer_is_hf(tapped):
    """Mixed prompts; the last layer raw, and the state after the norm."""
    folder, engine = tapped
    prompts = {f"p{n}": prompt(n, seed=1) for n in (1, 33, 150)}
    for request_id, captured in run(engine, prompts).items():
        reference = oracle.states(folder, prompts[request_id])
        errors = {i: oracle.error(captured[i], reference[i]) for i in engine.layer_ids}
        assert max(errors.values()) < FLOAT32_ERROR, errors


def test_the_sampled_token_is_the_likeliest_of_the_norm_state(tapped):
    """Needs no other implementation: ``norm`` is what ``lm_head`` received, so its logits say what was sampled."""
    folder, engine = tapped
    head = oracle.output_embedding(folder)
    prompts = {f"s{n}": prompt(n, seed=8) for n in (1, 20, 70)}
    for captured in run(engine, prompts, max_tokens=4, ignore_eos=True).values():
        likeliest = (captured["norm"].float() @ head.T).argmax(dim=1).tolist()
        assert likeliest[captured.num_prompt_tokens - 1 :] == list(captured.output_token_ids)


def test_a_wrong_layer_would_show(open_engine, model):
    """The control: in this model each layer is far from its neighbours, so the bound above tells layers apart."""
    reference = oracle.states(model("llama"), prompt(33, seed=1))
    for layer in range(5):
        assert oracle.error(reference[layer], reference[layer + 1]) > 10 * FLOAT32_ERROR


def test_trained_model_in_float32(open_engine, model):
    """SmolLM2: 30 layers, states up to 22,574 on the first token."""
    layers = [*range(30), "norm"]
    engine = open_engine("smollm2", layer_ids=layers)
    token_ids = text(model("smollm2"), 34)
    captured = run(engine, {"p": token_ids})["p"]
    reference = oracle.states(model("smollm2"), token_ids, "float64")
    errors = {i: oracle.error(captured[i], reference[i]) for i in layers}
    assert max(errors.values()) < FLOAT32_ERROR, errors


def test_trained_model_in_bfloat16(open_engine, model):
    """No further from the exact states than twice what HF's own bfloat16 is."""
    skip_if_faulty("bfloat16")
    layers = [2, 15, 27, 29, "norm"]
    engine = open_engine("smollm2", layer_ids=layers, dtype="bfloat16")
    token_ids = text(model("smollm2"), 34)
    captured = run(engine, {"p": token_ids})["p"]
    assert {str(t.dtype) for t in captured.hidden_states} == {"torch.bfloat16"}
    exact = oracle.states(model("smollm2"), token_ids, "float64")
    theirs = oracle.states(model("smollm2"), token_ids, "bfloat16")
    for layer in layers:
        ours, noise = (
            oracle.typical_error(captured[layer], exact[layer]),
            oracle.typical_error(theirs[layer], exact[layer]),
        )
        assert ours <= 2 * noise, (layer, ours, noise)


@pytest.fixture
def llvmlite_without_dunders():
    """Round a fault of vLLM's on the CPU, which asks every module's objects for ``__dict__``: llvmlite's answer all.

    Not undone: llvmlite stays imported, and later engines meet the same fault.
    """
    if "kimi-start" in FAULTS:
        ffi = pytest.importorskip("llvmlite.binding.ffi")
        ask = type(ffi.lib).__getattr__

        def only_functions(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return ask(self, name)

        type(ffi.lib).__getattr__ = only_functions


@pytest.mark.usefixtures("llvmlite_without_dunders")
def test_kimi_k25_text(open_engine, model):
    """A multimodal wrapper: the layers are the language model's, not the vision tower's, which has as many."""
    skip_if_faulty("deepseek-build", "experts", "experts-amx", "kimi-gpu")
    if not detect().capabilities["kimi_k25"]:
        pytest.skip("this vLLM has no Kimi-K2.5")
    layers = [3, 0, "norm"]
    text_only = {"limit_mm_per_prompt": {"vision_chunk": 0}, "trust_remote_code": True}
    engine = open_engine("kimi_k25", layer_ids=layers, **PLAIN_OPS, **text_only)
    assert engine.num_layers == 4
    token_ids = prompt(80, seed=4)
    captured = run(engine, {"p": token_ids})["p"]
    reference = oracle.states(model("deepseek_v3"), token_ids)
    errors = {i: oracle.error(captured[i], reference[i]) for i in layers}
    assert max(errors.values()) < FLOAT32_ERROR, errors


def test_the_transformers_backend(open_engine, model):
    """HF's own layers put out [1, rows, hidden_size]."""
    layers = [3, 0, 5, "norm"]
    prompts = {f"t{n}": prompt(n, seed=9) for n in (1, 33, 150)}
    # First: the backend changes HF's class for the whole process, and it can then be built inside vLLM alone.
    references = {request_id: oracle.states(model("helium"), ids) for request_id, ids in prompts.items()}
    engine = open_engine("helium", layer_ids=layers, max_num_batched_tokens=64)
    for request_id, captured in run(engine, prompts).items():
        errors = {i: oracle.error(captured[i], references[request_id][i]) for i in layers}
        assert max(errors.values()) < FLOAT32_ERROR, errors
