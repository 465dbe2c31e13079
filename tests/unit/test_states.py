"""The residual stream in what a decoder layer returns."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_compat._adapters.states import LayerHooks, residual_stream

torch: Any = pytest.importorskip("torch")


def rows(value: float) -> Any:
    return torch.full((2, 3), value)


@pytest.mark.parametrize(
    ("output", "state"),
    [
        (rows(1), 1),
        ((rows(1),), 1),
        ((rows(1), None), 1),
        ([rows(1), None], 1),
        ((rows(1), rows(2)), 3),
        ([rows(1), rows(2)], 3),
    ],
)
def test_a_state_is_one_tensor_or_the_sum_of_two(output: Any, state: float) -> None:
    assert torch.equal(residual_stream(output, "Layer"), rows(state))


@pytest.mark.parametrize("output", [rows(1), (rows(1), None), (rows(1), rows(2))])
def test_a_state_is_not_written_over_by_later_layers(output: Any) -> None:
    state = residual_stream(output, "Layer")
    before = state.clone()
    for part in output if isinstance(output, tuple) else [output]:
        if part is not None:
            part.fill_(9)
    assert torch.equal(state, before)


@pytest.mark.parametrize(
    ("output", "found"),
    [
        (torch.zeros(2, 3, 4), r"\(\[2, 3, 4\]\)"),
        ((rows(1), rows(1), rows(1)), r"\(\[2, 3\], \[2, 3\], \[2, 3\]\)"),
        ((rows(1), torch.zeros(2, 4)), r"\(\[2, 3\], \[2, 4\]\)"),
        ((rows(1), "cache"), r"\(\[2, 3\], str\)"),
        (None, r"\(NoneType\)"),
    ],
)
def test_another_output_is_refused_with_what_it_was(output: Any, found: str) -> None:
    with pytest.raises(TypeError, match=rf"decoder layer Llama returns {found}; wanted a tensor"):
        residual_stream(output, "Llama")


def test_a_hook_receives_each_state_and_can_be_taken_out() -> None:
    layer, received = torch.nn.Identity(), list[Any]()
    remove = LayerHooks().install(layer, received.append)
    layer(rows(1))
    layer(rows(2))
    remove()
    layer(rows(3))
    assert [s[0, 0].item() for s in received] == [1, 2]
