"""Bytes of arrays and of torch's tensors, where torch is installed."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from vllm_compat.errors import CaptureError, UsageError
from vllm_compat.extract.tensors import states_blob


def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.mark.parametrize("save_dtype", ["float32", "auto", "bfloat16"])
def test_arrays_become_float32(save_dtype: Any) -> None:
    states = [np.array([[1.5, -2.0]]), np.array([[0.25, 8.0]])]
    blob = states_blob(states, (0, 1), save_dtype)
    assert (blob.dtype, blob.shape) == ("F32", (1, 2, 2))
    assert np.frombuffer(blob.data, dtype=np.float32).tolist() == [1.5, -2.0, 0.25, 8.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite(bad: float) -> None:
    states = [np.zeros((3, 2)), np.array([[0.0, 1.0], [0.0, 0.0], [bad, 0.0]])]
    with pytest.raises(CaptureError, match="layer id norm: the state of token 2 is not finite"):
        states_blob(states, (4, "norm"), "float32")


def test_tensors_of_neither_kind() -> None:
    with pytest.raises(UsageError, match="states are list"):
        states_blob([[[1.0]]], (0,), "float32")


def test_a_big_endian_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(UsageError, match="big-endian"):
        states_blob([np.zeros((1, 1))], (0,), "float32")


@pytest.mark.parametrize(
    ("have", "save", "expected"),
    [
        ("bfloat16", "bfloat16", "BF16"),
        ("float16", "bfloat16", "BF16"),
        ("float32", "bfloat16", "BF16"),
        ("bfloat16", "float32", "F32"),
        ("bfloat16", "auto", "BF16"),
        ("float16", "auto", "F16"),
    ],
)
def test_torch_bytes_are_torchs_own(have: str, save: Any, expected: str) -> None:
    t = torch()
    generator = t.Generator().manual_seed(0)
    states = [t.randn(5, 3, generator=generator).to(getattr(t, have)) for _ in range(2)]
    blob = states_blob([s.t().contiguous().t() for s in states], (0, 1), save)  # not contiguous
    want = t.stack(states, dim=1).to(getattr(t, have if save == "auto" else save))
    assert (blob.dtype, blob.shape) == (expected, (5, 2, 3))
    back = t.frombuffer(bytearray(blob.data), dtype=want.dtype).reshape(blob.shape)
    assert t.equal(back, want)


def test_torch_values_that_only_the_saved_dtype_cannot_hold() -> None:
    t = torch()
    with pytest.raises(CaptureError, match="layer id 7: the state of token 1 is not finite"):
        states_blob([t.tensor([[0.0], [3.4e38]])], (7,), "bfloat16")


def test_torch_dtypes_that_are_not_saved() -> None:
    t = torch()
    with pytest.raises(UsageError, match="float64"):
        states_blob([t.zeros(1, 1, dtype=t.float64)], (0,), "auto")
