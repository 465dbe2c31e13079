"""Where a CPU build chooses kernels that it does not have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version

from vllm_compat._detect.matrix import find_release
from vllm_compat._engine.amx import BLOCK_SIZE, lacks_amx

torch: Any = pytest.importorskip("torch")


def found(release: str | None) -> Any:
    return SimpleNamespace(release=find_release(Version(release)) if release else None)


def config(device: str = "cpu", dtype: Any = torch.bfloat16) -> Any:
    return SimpleNamespace(device_config=SimpleNamespace(device_type=device), model_config=SimpleNamespace(dtype=dtype))


@pytest.fixture(params=[True, False], ids=["amx", "no amx"])
def amx(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(torch._C._cpu, "_is_amx_tile_supported", lambda: request.param, raising=False)
    return bool(request.param)


def test_0_16_on_such_a_processor_in_bfloat16(amx: bool) -> None:
    assert lacks_amx(found("0.16.0"), config()) is amx


@pytest.mark.parametrize(
    ("release", "device", "dtype"),
    [
        ("0.15.1", "cpu", torch.bfloat16),
        ("0.17.0", "cpu", torch.bfloat16),
        (None, "cpu", torch.bfloat16),
        ("0.16.0", "cuda", torch.bfloat16),
        ("0.16.0", "cpu", torch.float32),
    ],
)
def test_nothing_else(amx: bool, release: str | None, device: str, dtype: Any) -> None:
    assert not lacks_amx(found(release), config(device, dtype))


def test_a_torch_that_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._cpu, "_is_amx_tile_supported", raising=False)
    assert not lacks_amx(found("0.16.0"), config())


def test_such_blocks_lead_to_other_kernels() -> None:
    assert BLOCK_SIZE % 32
