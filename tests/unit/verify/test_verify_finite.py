"""Finiteness by bits, wherever in the states the value is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vllm_compat.verify.finite import dtype_name, find_nonfinite

BAD = (np.nan, -np.nan, np.inf, -np.inf)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("place", [(0, 0, 0), (511, 2, 299), (300, 1, 17)])
def test_numpy(dtype: str, value: float, place: tuple[int, int, int]) -> None:
    states = np.zeros((512, 3, 300), dtype=dtype)
    states[10], states[11] = np.finfo(dtype).max, np.finfo(dtype).min
    assert find_nonfinite(states) is None
    states[place] = value
    assert find_nonfinite(states) == place[:2]
    assert dtype_name(states) == dtype


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("value", BAD)
def test_torch(dtype: str, value: float) -> None:
    torch: Any = pytest.importorskip("torch")
    kind = getattr(torch, dtype)
    states = torch.randn(300, 4, 130, dtype=kind)
    states[0], states[1] = torch.finfo(kind).max, torch.finfo(kind).min
    assert find_nonfinite(states) is None
    assert find_nonfinite(states.transpose(0, 1)) is None
    states[299, 3, 129] = value
    assert find_nonfinite(states) == (299, 3)
    states[7, 2, 0] = value
    assert find_nonfinite(states) == (7, 2)


def test_no_tokens() -> None:
    assert find_nonfinite(np.zeros((0, 3, 8), dtype=np.float32)) is None
