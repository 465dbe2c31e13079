"""One model over two nodes by vLLM's own Ray executor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import oracle
import pytest
import torch
from ray_on_a_cpu import LAYERS

from conftest import FLOAT32_ERROR, ON_GPU, prompt, skip_if_faulty
from vllm_compat import detect

pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(900)
RAY = {
    "RAY_TMPDIR": "/tmp",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
PROMPTS = {f"r{n}": prompt(length, seed=n) for n, length in enumerate((1, 90, 7, 200, 33, 64, 2, 150))}


def test_two_ranks_on_two_nodes_give_the_states_of_one_model(model, tmp_path):
    if ON_GPU:
        pytest.skip("two nodes on one machine are for CPUs")
    skip_if_faulty("tensor-parallel")
    prompts, out = tmp_path / "prompts.json", tmp_path / "captured.pt"
    prompts.write_text(json.dumps(PROMPTS))
    environment = os.environ | RAY | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("ray_on_a_cpu.py")), str(model("llama")), str(prompts)]
    done = subprocess.run([*command, str(out)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (detect().version, done.stdout[-3000:], done.stderr[-5000:])
    found = torch.load(out, weights_only=True)
    assert found["executor"].startswith("Ray")
    assert len(set(found["nodes"])) == 2
    assert found["captured"].keys() == PROMPTS.keys()
    for request_id, token_ids in PROMPTS.items():
        reference = oracle.states(model("llama"), token_ids)
        for layer, tensor in zip(LAYERS, found["captured"][request_id], strict=True):
            assert oracle.error(tensor, reference[layer]) < FLOAT32_ERROR, (request_id, layer)
