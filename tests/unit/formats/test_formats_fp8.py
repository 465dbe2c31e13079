"""``speculators-fp8``: what decoding gives is what the reader's arithmetic gives, and close to what was there."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_compat.errors import CaptureError
from vllm_compat.formats import SampleData, get_format

torch: Any = pytest.importorskip("torch")
from safetensors.torch import load_file  # noqa: E402

from vllm_compat.formats.once import warn_once  # noqa: E402
from vllm_compat.formats.speculators_fp8 import dequantize, quantize  # noqa: E402


def some_states(seed: int, power: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.linspace(power, power + 3, 4)[:, None]
    return (torch.randn(5, 4, 16, generator=generator) * sizes).to(torch.bfloat16)


@given(seed=st.integers(0, 2**32), power=st.integers(-30, 30))
@settings(max_examples=100, deadline=None)
def test_error_of_a_state(seed: int, power: int) -> None:
    states = some_states(seed, power)
    quantized, scales = quantize(states)
    assert scales.shape == (5, 4, 1)
    assert torch.equal(scales, 2.0 ** scales.log2().round()), "powers of two, which no product rounds"
    back, exact = dequantize(quantized, scales).double(), states.double()
    assert torch.equal(back, quantized.double() * scales.double()), "no rounding in the reader's bfloat16"
    most = exact.abs().amax(-1, keepdim=True)
    # Half a step of three binary digits for a normal value; half a subnormal's step, 2**-10 of a scale, below that.
    assert ((back - exact).abs() <= torch.maximum(exact.abs() / 16, scales.double() * 2.0**-10)).all()
    assert (most / scales.double() > 448 / 2).all(), "the scale is the least one"
    assert (most / scales.double() <= 448).all()


@given(seed=st.integers(0, 2**32), power=st.integers(-30, 30))
@settings(max_examples=50, deadline=None)
def test_once_more_changes_nothing(seed: int, power: int) -> None:
    once = dequantize(*quantize(some_states(seed, power)))
    assert torch.equal(dequantize(*quantize(once)), once)


def test_zeros_and_the_smallest() -> None:
    states = torch.zeros(2, 1, 4, dtype=torch.bfloat16)
    states[1, 0, 0] = 2.0**-126
    back = dequantize(*quantize(states))
    assert torch.equal(back[0], states[0])
    assert back.isfinite().all()


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3e38])
def test_values_without_a_place(value: float) -> None:
    with pytest.raises(CaptureError, match="no place in float8"):
        quantize(torch.full((1, 1, 2), value))


def test_the_file(tmp_path: Path) -> None:
    form = get_format("speculators-fp8")
    states = some_states(0, 0)
    data = SampleData(3, "a", (1, 2, 3, 4, 5), (0, 0, 1, 1, 1), (1, 2, 3, 5), states, {})
    path = tmp_path / form.file(3, "a")
    path.parent.mkdir()
    path.write_bytes(b"".join(form.encode(data)))
    found = load_file(path)
    assert {name: (str(t.dtype), tuple(t.shape)) for name, t in found.items()} == {
        "hidden_states": ("torch.float8_e4m3fn", (5, 4, 16)),
        "hidden_states_scales": ("torch.float32", (5, 4, 1)),
        "token_ids": ("torch.int64", (5,)),
        "loss_mask": ("torch.int64", (5,)),
    }
    back = form.decode(path, 3)
    assert torch.equal(back.hidden_states, dequantize(*quantize(states)))
    assert back.metadata["quantized"] == "float8_e4m3fn"
    assert back.hidden_states.dtype == torch.bfloat16


def test_the_warning(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("datasets")
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        get_format("speculators-fp8").check((1, 2, 3, 5), 6)
    assert "wrong states, and no error" in caplog.text
