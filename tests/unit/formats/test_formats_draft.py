"""The snippet for the draft model's configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_compat.formats import SealedRun, get_format
from vllm_compat.formats.draft import draft_config
from vllm_compat.types import LayerId


@pytest.mark.parametrize(
    ("layer_ids", "expected"),
    [
        ((2, 30, 58, 60), [3, 31, 59]),
        ((2, 30, 58, "norm"), [3, 31, 59]),
        ((2, 30, 58, 60, "norm"), [3, 31, 59]),
        ((60, 2, 30, 58), [3, 31, 59]),
        ((2, 30, 58), [3, 31, 59]),
        ((0, 59), [1, 60]),
    ],
)
def test_the_ids_are_vllms_own(layer_ids: tuple[LayerId, ...], expected: list[int]) -> None:
    assert draft_config(layer_ids, 61) == {"eagle_aux_hidden_state_layer_ids": expected}


@pytest.mark.parametrize("layer_ids", [("norm",), (60,), (60, "norm")])
def test_no_auxiliary_layer(layer_ids: tuple[LayerId, ...]) -> None:
    assert draft_config(layer_ids, 61) == {}


@pytest.mark.parametrize(("num_layers", "there"), [(61, True), (None, False)])
def test_every_run_gets_it(tmp_path: Path, num_layers: int | None, there: bool) -> None:
    run = SealedRun((), lambda: iter(()), 0, (2, 30, 58, 60), num_layers, "m", {})
    get_format("safetensors").seal(tmp_path, run)
    path = tmp_path / "draft_config.json"
    assert path.exists() == there
    if there:
        assert json.loads(path.read_text()) == {"eagle_aux_hidden_state_layer_ids": [3, 31, 59]}
