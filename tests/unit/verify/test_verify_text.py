"""The table, the line of shades and the picture, of figures that are made up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from vllm_compat.verify.compare import Errors, LayerResult, Recomputed
from vllm_compat.verify.picture import draw
from vllm_compat.verify.reference import Name
from vllm_compat.verify.table import heat, table, worst_of_places


def result(layer_id: int, *, ok: bool = True, looks_like: tuple[Name, ...] = ()) -> LayerResult:
    ours, noise = Errors(0.01, 0.009, 0.5, 5), Errors(0.011, 0.01, 0.4, 0)
    return LayerResult(layer_id, ours, noise, 0.022, ok, looks_like[0] if looks_like else 0, 0.3, looks_like)


def compared(*layers: LayerResult) -> Recomputed:
    cosines = np.full((len(layers), 10), 1.0)
    cosines[-1, 5] = 0.0
    return Recomputed(layers, (3, 8), (4, 6), cosines, 4)


def test_the_table_says_what_a_wrong_layer_is() -> None:
    found = compared(result(1), result(2, ok=False, looks_like=(1,)), result(3, ok=False, looks_like=("norm",)))
    lines = table(found).splitlines()
    assert len(lines) == 4
    assert "5.00e-01 (8:1)" in lines[1]  # the sixth token of all is the second of the second sample
    assert lines[1].endswith("would show  ok")
    assert lines[2].endswith("WRONG: layer 2 matches layer 1")
    assert lines[3].endswith("WRONG: the last entry is post-norm, the run says pre-norm")


def test_neighbours_within_the_noise_are_said_to_be() -> None:
    assert "0 in the noise" in table(compared(result(1, looks_like=(0,))))


def test_what_matches_nothing_and_what_matches_the_embeddings() -> None:
    found = compared(result(1))
    assert "matches no layer" in found.diagnose(result(1, ok=False))
    assert "matches the embeddings" in found.diagnose(result(0, ok=False, looks_like=("embed",)))
    assert found.diagnose(result(1)) == ""


def test_shades_show_where_it_is_wrong() -> None:
    lines = heat(compared(result(1), result(2))).splitlines()
    assert lines[0] == "1 |          |"
    assert lines[1] == "2 |     @    |"
    assert lines[2].endswith("samples 3 8")


def test_tokens_that_share_a_place_show_the_worst() -> None:
    assert worst_of_places([1.0] * 99 + [0.5], 10) == [1.0] * 9 + [0.5]
    assert worst_of_places([0.1, 0.2], 10) == [0.1, 0.2]


def test_a_picture_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(compared(result(1), result(2)), tmp_path / "picture", "a run")
    assert (tmp_path / "picture").read_bytes().startswith(b"\x89PNG")
