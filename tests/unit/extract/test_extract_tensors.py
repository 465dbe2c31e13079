"""Arrays and torch's tensors, where torch is installed, as one tensor in the dtype to save."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vllm_compat.errors import NonFiniteError, UsageError
from vllm_compat.extract.tensors import stack_states


def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.mark.parametrize("save_dtype", ["float32", "auto", "bfloat16"])
def test_arrays_become_float32(save_dtype: Any) -> None:
    states = [np.array([[1.5, -2.0]]), np.array([[0.25, 8.0]])]
    stacked = stack_states(states, (0, 1), save_dtype)
    assert stacked.dtype == np.float32
    assert stacked.tolist() == [[[1.5, -2.0], [0.25, 8.0]]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite(bad: float) -> None:
    states = [np.zeros((3, 2)), np.array([[0.0, 1.0], [0.0, 0.0], [bad, 0.0]])]
    with pytest.raises(NonFiniteError, match="layer id norm: the state of token 2 is not finite"):
        stack_states(states, (4, "norm"), "float32")


def test_tensors_of_neither_kind() -> None:
    with pytest.raises(UsageError, match="states are list"):
        stack_states([[[1.0]]], (0,), "float32")


@pytest.mark.parametrize(
    ("have", "save", "expected"),
    [
        ("bfloat16", "bfloat16", "bfloat16"),
        ("float16", "bfloat16", "bfloat16"),
        ("float32", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "float32"),
        ("bfloat16", "auto", "bfloat16"),
        ("float16", "auto", "float16"),
    ],
)
def test_torchs_tensors_take_the_dtype_to_save(have: str, save: Any, expected: str) -> None:
    t = torch()
    generator = t.Generator().manual_seed(0)
    states = [t.randn(5, 3, generator=generator).to(getattr(t, have)) for _ in range(2)]
    stacked = stack_states([s.t().contiguous().t() for s in states], (0, 1), save)  # not contiguous
    assert (stacked.dtype, tuple(stacked.shape)) == (getattr(t, expected), (5, 2, 3))
    assert t.equal(stacked, t.stack(states, dim=1).to(stacked.dtype))


@pytest.mark.parametrize(("save", "copied"), [("auto", False), ("float32", False), ("bfloat16", True)])
def test_torchs_states_that_are_one_tensor_are_not_copied(save: Any, copied: bool) -> None:
    t = torch()
    whole = t.arange(30.0).reshape(5, 2, 3)
    stack = stack_states([whole[:, 0], whole[:, 1]], (0, 1), save)
    assert t.equal(stack.float(), whole)
    assert (stack.data_ptr() != whole.data_ptr()) == copied


def test_torch_values_that_only_the_saved_dtype_cannot_hold() -> None:
    t = torch()
    with pytest.raises(NonFiniteError, match="layer id 7: the state of token 1 is not finite"):
        stack_states([t.tensor([[0.0], [3.4e38]])], (7,), "bfloat16")
