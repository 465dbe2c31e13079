"""The residual stream in what a decoder layer returns."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_compat._adapters.states import LayerHooks, summands

torch: Any = pytest.importorskip("torch")


def rows(value: float) -> Any:
    return torch.full((2, 3), value)


@pytest.mark.parametrize(
    ("output", "values"),
    [
        (rows(1), [1]),
        ((rows(1),), [1]),
        ((rows(1), None), [1]),
        ([rows(1), None], [1]),
        ((rows(1), rows(2)), [1, 2]),
        ([rows(1), rows(2)], [1, 2]),
        (rows(1)[None], [1]),  # a batch of one, of vLLM's Transformers backend
        ((rows(1)[None],), [1]),
    ],
)
def test_a_state_is_one_tensor_or_two_to_add(output: Any, values: list[float]) -> None:
    parts = summands(output, "Layer")
    assert len(parts) == len(values)
    assert all(torch.equal(part, rows(value)) for part, value in zip(parts, values, strict=True))


@pytest.mark.parametrize(
    ("output", "found"),
    [
        (torch.zeros(2, 3, 4), r"\(\[2, 3, 4\]\)"),
        ((rows(1), rows(1), rows(1)), r"\(\[2, 3\], \[2, 3\], \[2, 3\]\)"),
        ((rows(1), torch.zeros(2, 4)), r"\(\[2, 3\], \[2, 4\]\)"),
        ((rows(1), "cache"), r"\(\[2, 3\], str\)"),
        (None, r"\(NoneType\)"),
        ((), r"\(\)"),
    ],
)
def test_another_output_is_refused_with_what_it_was(output: Any, found: str) -> None:
    with pytest.raises(TypeError, match=rf"decoder layer Llama returns {found}; wanted a tensor"):
        summands(output, "decoder layer Llama")


def test_a_hook_receives_each_state_and_can_be_taken_out() -> None:
    layer, received = torch.nn.Identity(), list[Any]()
    remove = LayerHooks().install(layer, received.extend)
    layer(rows(1))
    layer(rows(2))
    remove()
    layer(rows(3))
    assert [s[0, 0].item() for s in received] == [1, 2]
