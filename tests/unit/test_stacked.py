"""Layers' states as columns of one tensor, and back without a copy."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_compat._stacked import columns, stacked

torch: Any = pytest.importorskip("torch")


def stack(tokens: int = 5, layers: int = 3, width: int = 4, dtype: Any = None) -> Any:
    return torch.arange(tokens * layers * width, dtype=dtype or torch.float32).view(tokens, layers, width)


@pytest.mark.parametrize("shape", [(5, 3, 4), (1, 3, 4), (5, 1, 4), (5, 3, 1), (1, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_columns_are_views_that_are_stacked_again_without_a_copy(shape: tuple[int, int, int], dtype: Any) -> None:
    whole = stack(*shape, dtype)
    views = columns(whole)
    assert [v.tolist() for v in views] == [whole[:, layer].tolist() for layer in range(shape[1])]
    again = stacked(views)
    assert again is not None
    assert torch.equal(again, whole)
    assert again.data_ptr() == whole.data_ptr()
    assert again.is_contiguous()


def test_columns_of_rows_further_down_are_stacked_from_there() -> None:
    whole = stack()
    found = stacked([c[2:4] for c in columns(whole)])
    assert found is not None
    assert torch.equal(found, whole[2:4])
    assert found.data_ptr() == whole[2].data_ptr()


A, B, C = columns(stack())


@pytest.mark.parametrize(
    "states",
    [
        [B, A, C],
        [A, C],
        [A, B],
        [B, C],
        [A, A, A],
        [A, B, C[:4]],
        [A, B, C.clone()],
        [A.clone(), B.clone(), C.clone()],
        [A, B, columns(stack())[2]],
        [A, B, C.view(torch.int32)],
        [A[:, :2], B[:, :2], C[:, :2]],
        [A.T, B.T, C.T],
        [[[1.0]], [[2.0]]],
        [stack(), stack()],
        [A[0], B[0], C[0]],
    ],
    ids=lambda states: "",
)
def test_other_states_are_not(states: Any) -> None:
    assert stacked(states) is None
