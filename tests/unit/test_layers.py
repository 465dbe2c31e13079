"""Layer ids as asked for: kept in order, refused with the range."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_compat import UsageError
from vllm_compat._layers import check_layer_ids, parse_layer_id


@pytest.mark.parametrize("layer_ids", [(), (0,), (3, 0, 2), ("norm", 1), (3, "norm", 0)])
def test_layer_ids_are_kept_in_the_order_asked_for(layer_ids: tuple[Any, ...]) -> None:
    assert check_layer_ids(layer_ids, 4) == layer_ids
    assert check_layer_ids(list(layer_ids), 4) == layer_ids


@pytest.mark.parametrize("layer_id", [4, 5, -1, 10**20])
def test_an_id_out_of_range_is_refused_with_the_range(layer_id: int) -> None:
    with pytest.raises(UsageError, match=f"layer id {layer_id} is out of range: the model has 4 .*layers, 0 to 3"):
        check_layer_ids((0, layer_id), 4)


def test_the_refusal_explains_vllm_s_own_numbers() -> None:
    with pytest.raises(UsageError, match=r"vLLM's own auxiliary ids are one higher \(its 4 is 3 here\)") as caught:
        check_layer_ids([4], 4)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("layer_id", [True, False, 1.0, "1", "Norm", None, (1,)])
def test_what_is_no_layer_id_is_refused(layer_id: Any) -> None:
    with pytest.raises(UsageError, match="is neither an integer nor 'norm'"):
        check_layer_ids([0, layer_id], 4)


@pytest.mark.parametrize(
    ("layer_ids", "twice"),
    [((1, 0, 1), "1"), (("norm", 1, "norm"), "norm"), ((1, 1, 2, 2, "norm"), "1, 2"), ((0, 0, 0), "0")],
)
def test_an_id_asked_for_twice_is_refused_by_name(layer_ids: tuple[Any, ...], twice: str) -> None:
    with pytest.raises(UsageError, match=rf"layer id\(s\) {twice} asked for more than once"):
        check_layer_ids(layer_ids, 4)


@pytest.mark.parametrize(("text", "layer_id"), [("0", 0), ("30", 30), ("007", 7), ("norm", "norm")])
def test_a_layer_id_of_a_command_line(text: str, layer_id: int | str) -> None:
    assert parse_layer_id(text) == layer_id


@pytest.mark.parametrize("text", ["", "-1", "+1", "1.0", " 1", "1 ", "Norm", "all", "1,2", "0x1", "²"])
def test_another_text_is_no_layer_id(text: str) -> None:
    with pytest.raises(ValueError, match="a layer id is a number from 0, or `norm`; found "):
        parse_layer_id(text)
