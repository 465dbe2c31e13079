"""Every value there is in 16 bits, and the borders of 32, against torch's own word on whether it is finite."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_compat.extract.tensors import _all_finite

torch: Any = pytest.importorskip("torch")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_each_of_16_bits(dtype: Any) -> None:
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    stack = torch.full((3, 2, 2), -1.5, dtype=dtype)
    for value, finite in zip(bits.view(dtype), torch.isfinite(bits.view(dtype)).tolist(), strict=True):
        stack[1, 1, 0] = value
        assert _all_finite(stack) is finite, value


@pytest.mark.parametrize("bits", [0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0, 1, 0x00800000])
@pytest.mark.parametrize("sign", [0, 1 << 31])
def test_the_borders_of_32_bits(bits: int, sign: int) -> None:
    value = torch.tensor([bits - (1 << 31 if sign else 0)], dtype=torch.int64).to(torch.int32).view(torch.float32)
    stack = torch.randn(5, 3, 7)
    stack[4, 2, 6] = value[0]
    assert _all_finite(stack) is bool(torch.isfinite(value)[0])


@pytest.mark.parametrize("at", [0, (1 << 19) - 1, 1 << 19, (1 << 20) + 4])
def test_wherever_it_is(at: int) -> None:
    stack = torch.zeros(1, 1, (1 << 20) + 5, dtype=torch.bfloat16)
    assert _all_finite(stack)
    stack[0, 0, at] = float("-inf")
    assert not _all_finite(stack)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_other_dtypes_and_views(value: float) -> None:
    for stack in (torch.zeros(4, 2, 6, dtype=torch.float64), torch.zeros(4, 2, 12).bfloat16()[:, :, ::2]):
        assert _all_finite(stack)
        stack[2, 1, 3] = value
        assert not _all_finite(stack)
