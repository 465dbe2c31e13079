"""Two replicas of a real model on a Ray cluster of this machine, one of which is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import oracle
import pytest
from safetensors import safe_open

from conftest import FLOAT32_ERROR, ON_GPU, prompt

pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(1500)  # two loaded cores import vLLM for minutes, and here it is imported four times
ROWS = 320
LAYERS = (1, 5, "norm")
# Without them a token is left in the home folder, and Ray asks on the net whether it may count.
RAY = {
    "RAY_TMPDIR": "/tmp",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


@pytest.fixture(scope="module")
def address():
    """Where a Ray cluster is, that of RAY_ADDRESS or one for this module."""
    if os.environ.get("RAY_ADDRESS"):
        yield os.environ["RAY_ADDRESS"]
        return
    head = subprocess.Popen(
        [sys.executable, str(Path(__file__).parents[1] / "ray_head.py")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | RAY
    )  # fmt: skip
    found = next((line.split()[1] for line in head.stdout if line.startswith("address")), None)
    assert found, "Ray did not start"
    yield found
    head.communicate()


@pytest.fixture(scope="module")
def command(model, tmp_path_factory):
    """``command(output, *options)``: the command line and its environment."""
    data = tmp_path_factory.mktemp("replicas") / "data.jsonl"
    data.write_text("".join(json.dumps({"input_ids": prompt(100 + i, seed=i)}) + "\n" for i in range(ROWS)))
    # Each replica has a core, which it shares with nobody as long as there are two.
    environment = os.environ | RAY
    environment |= {} if ON_GPU else {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}

    def make(output, *options):
        found = [sys.executable, "-m", "vllm_compat.extract", "--model-path", str(model("llama"))]
        found += ["--prepared-data", str(data), "--output-dir", str(output), "--batch-size", "2"]
        found += ["--layer-ids", *map(str, LAYERS), "--dtype", "float32", "--save-dtype", "float32", *options]
        return found + (["--gpu-memory-utilization", "0.3"] if ON_GPU else []), environment

    return make


def at_work(output: Path) -> list[int]:
    """The replicas that have a journal of a run open, which are those that do a shard now."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdecimal() and (folder / "cmdline").read_bytes().startswith(b"ray::Replica"):
                names = [str(file.readlink()) for file in (folder / "fd").iterdir()]
                found += [int(folder.name)] * any(name.startswith(f"{output}/journal-") for name in names)
        except OSError:
            continue
    return found


def test_a_killed_replica_is_made_up_for(command, address, tmp_path):
    output, alone = tmp_path / "replicas", tmp_path / "alone"
    arguments, environment = command(output, "--replicas", "2", "--json")
    process = subprocess.Popen(
        arguments, env=environment | {"RAY_ADDRESS": address}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    killed = []

    def kill() -> None:
        while process.poll() is None and not killed:
            if len(list(output.glob("hs_*"))) >= 5 and (found := at_work(output)):
                os.kill(found[0], signal.SIGKILL)
                killed.extend(found[:1])
            time.sleep(0.005)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    out, err = process.communicate()
    print(err)
    assert process.returncode == 0, err[-6000:]
    assert killed
    assert re.search(r"rehearsal: \d of \d layers, \d+ samples of 1 to \d+ tokens", err)
    assert "was lost: The actor died" in err
    assert "takes over shard" in err
    summary = json.loads(out)
    assert (summary["complete"], summary["samples"]) == (True, ROWS)

    arguments, environment = command(alone, "--no-rehearsal")
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    names = sorted(path.name for path in alone.glob("hs_*"))
    assert sorted(path.name for path in output.glob("hs_*")) == names
    assert len(names) == ROWS
    lines = [
        json.loads(line[9:])["index"] for path in output.glob("journal-*") for line in path.read_text().splitlines()
    ]
    assert sorted(lines) == list(range(ROWS)), "none was done twice"
    for name in names:
        with safe_open(output / name, "pt") as ours, safe_open(alone / name, "pt") as theirs:
            assert (ours.get_tensor("token_ids") == theirs.get_tensor("token_ids")).all()
            for place in range(len(LAYERS)):
                mine, other = (file.get_tensor("hidden_states")[:, place] for file in (ours, theirs))
                assert oracle.error(mine, other) < FLOAT32_ERROR
