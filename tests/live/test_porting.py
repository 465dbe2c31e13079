"""The lines of docs/porting.md, run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import oracle
import pytest

from conftest import FLOAT32_ERROR, prompt

PAGE = Path(__file__).resolve().parents[2] / "docs" / "porting.md"
(LINES,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(params=[4096, 64], ids=["whole", "pieces"])
def built(request, open_engine):
    """A scheduler and an executor that know nothing of capturing."""
    core = open_engine("llama", enable_prefix_caching=False, max_num_batched_tokens=request.param)
    return {"scheduler": core._scheduler, "executor": core._executor}


def test_the_ten_lines(built, model):
    """Twelve samples of many lengths: each one's states are its own, layer for layer in the order asked for."""
    samples = {str(n): tuple(prompt(1 + 31 * n % 190, seed=n)) for n in range(12)}
    saved = {}
    exec(LINES, {**built, "samples": samples, "save": lambda request_id, *states: saved.update({request_id: states})})
    assert saved.keys() == samples.keys()
    for request_id, token_ids in samples.items():
        reference = oracle.states(model("llama"), token_ids)
        for layer, found in zip((3, 0, 5), saved[request_id], strict=True):
            assert found.shape == (len(token_ids), 128)
            assert oracle.error(found, reference[layer]) < FLOAT32_ERROR, (request_id, layer)


def test_they_are_ten_and_name_nothing_of_vllms():
    assert len([line for line in LINES.splitlines() if line.strip()]) <= 11  # and the import
    assert "vllm." not in LINES
