"""A copy has the states' bytes of the file that it is made from, and labels of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from vllm_compat.formats import SampleData, get_format

torch: Any = pytest.importorskip("torch")


def sample(index: int, states: Any, **changes: Any) -> SampleData:
    tokens = tuple(range(len(states)))
    values: dict[str, Any] = {"id": None, "loss_mask": None, "layer_ids": (0, 2, 4, 7), "metadata": {"model": "m"}}
    return SampleData(index=index, token_ids=tokens, hidden_states=states, **(values | changes))


def test_float8_is_not_rounded_a_second_time(tmp_path: Path) -> None:
    """A largest value just above half of what a scale holds is rounded to that half: a smaller scale would do."""
    form = get_format("speculators-fp8")
    states = torch.tensor([[[225.0, 0.013, -3.3], [448.0, 1.0, 0.0], [1e-30, 5.0, 7.7], [0.0, 0.0, 0.0]]] * 2)
    states = states.to(torch.bfloat16)
    path = tmp_path / "hs_0.safetensors"
    path.write_bytes(b"".join(form.encode(sample(0, states, id="a", loss_mask=(0, 1)))))
    decoded = form.decode(path, 0)
    again = tmp_path / "again"
    again.write_bytes(b"".join(form.encode(sample(3, decoded.hidden_states))))
    copy = tmp_path / "hs_3.safetensors"
    copy.write_bytes(b"".join(form.encode_copy(sample(3, decoded.hidden_states), path)))
    with (
        safe_open(path, "pt") as original,
        safe_open(copy, "pt") as copied,
        safe_open(again, "pt") as rounded,
    ):
        for name in ("hidden_states", "hidden_states_scales"):
            assert torch.equal(original.get_tensor(name).view(torch.uint8), copied.get_tensor(name).view(torch.uint8))
        assert not torch.equal(
            original.get_tensor("hidden_states_scales"), rounded.get_tensor("hidden_states_scales")
        ), "else this test shows nothing"
        assert copied.metadata()["index"] == "3"
        assert "sample_id" not in copied.metadata()
        assert set(copied.keys()) == {"token_ids", "hidden_states", "hidden_states_scales"}
    plain = sample(3, states)
    assert copy.read_bytes() == b"".join(form.encode(plain)), "as if it had been computed"


@pytest.mark.parametrize("name", ["safetensors", "per-layer", "speculators-v1", "specforge", "modelopt"])
def test_other_formats_give_back_what_they_were_given(tmp_path: Path, name: str) -> None:
    form = get_format(name)
    states = torch.randn(3, 4, 5).to(torch.bfloat16)
    layers = (0, 2, 4, "norm")
    path = tmp_path / "original"
    path.write_bytes(b"".join(form.encode(sample(0, states, layer_ids=layers))))
    decoded = form.decode(path, 0).hidden_states
    for changes in ({"loss_mask": (0, 1, 1), "id": "b"}, {}):
        copy = form.encode_copy(sample(3, decoded, layer_ids=layers, **changes), path)
        assert b"".join(copy) == b"".join(form.encode(sample(3, states, layer_ids=layers, **changes)))
