"""Kimi-K2.5's text shape on GPUs: MLA, INT4 experts, 61 layers, dummy weights. vLLM itself is the oracle."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from conftest import ON_GPU, RANKS, prompt, run

LAYERS = [2, 30, 58, 60, "norm"]
LENGTHS = (1, 700, 33, 2000, 128, 5, 1500, 64)
VOCAB = 163840


def _gpu_gib() -> float:
    return sum(torch.cuda.get_device_properties(n).total_memory for n in range(torch.cuda.device_count())) / 2**30


pytestmark = pytest.mark.skipif(not ON_GPU or _gpu_gib() < 130 * RANKS, reason="wants GPUs of 130 GiB")


@pytest.fixture(scope="module", params=["tensor-parallel", "expert-parallel"] if RANKS > 1 else ["one"])
def engine(request, open_engine):
    """A budget of 512 tokens cuts the longer prompts into pieces."""
    engine = open_engine(
        "kimi_int4",
        layer_ids=LAYERS,
        dtype="bfloat16",
        load_format="dummy",
        max_model_len=2049,
        max_num_batched_tokens=512,
        enable_expert_parallel=request.param == "expert-parallel",
    )
    engine._executor.collective_rpc(set_norms)
    return engine


def set_norms(worker):
    """Run in each worker. Dummy norms are near 0, with which every layer is the identity."""
    for name, parameter in worker.model_runner.model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.fill_(1.0)


@pytest.fixture(scope="module")
def captured(engine):
    return run(engine, {f"k{n}": prompt(n, seed=3, vocab=VOCAB) for n in LENGTHS})


def test_every_row_is_there_and_finite(captured):
    for length in LENGTHS:
        states = captured[f"k{length}"]
        assert states.token_ids == tuple(prompt(length, seed=3, vocab=VOCAB))
        for tensor in states.hidden_states:
            assert (tuple(tensor.shape), tensor.dtype) == ((length, 7168), torch.bfloat16)
            assert torch.isfinite(tensor).all()


def test_the_norm_state_is_the_last_layers_and_gives_the_sampled_token(engine, captured):
    """vLLM's own norm over layer 60 is the ``norm`` state, and its own ``lm_head`` over that gives what it sampled."""
    for states in captured.values():
        replies = engine._executor.collective_rpc(head, args=(states[60][-1:], states["norm"][-1:]))
        apart, likeliest, sampled = *replies[0], states.output_token_ids[0]
        assert apart < 1e-2
        assert sampled in likeliest


def test_layers_are_told_apart(captured):
    """The control: the layers' states differ by far more than rounding."""
    states = captured["k700"]
    for one, other in pairwise(LAYERS):
        first, second = states[one].float(), states[other].float()
        assert ((first - second).norm(dim=1) / first.norm(dim=1)).median() > 0.02


def head(worker, last, norm):
    """Run in each worker: how far vLLM's norm of ``last`` is from ``norm``, and the likeliest tokens of ``norm``."""
    model = worker.model_runner.model
    with torch.inference_mode():
        again = model.model.norm(last.cuda().contiguous())
        logits = model.compute_logits(norm.cuda())
    apart = float((again.float().cpu() - norm.float()).norm() / norm.float().norm())
    # Equal logits are common in bfloat16; which of them is sampled is the sampler's affair.
    best = [] if logits is None else (logits[0] == logits[0].max()).nonzero().flatten().tolist()
    return apart, best
