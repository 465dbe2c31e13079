"""The same in float8, by the reader that the releases from 0.9 on have for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from rows import Row
from trainer import find, load_samples
from writers import WRITERS

from vllm_compat._detect.speculators import SpeculatorsRelease


@pytest.mark.parametrize("writer", ["reference", "ours"])
def test_every_sample_is_what_was_written_within_the_error_of_float8(
    writer: str, tmp_path: Path, rows: Sequence[Row], release: SpeculatorsRelease
) -> None:
    WRITERS["speculators-fp8"][writer](tmp_path / "data", rows)
    transfer = find(release.readers["speculators-fp8"])(tmp_path / "data" / "hidden_states")
    samples = load_samples("speculators", tmp_path / "data", release, transfer=transfer)
    assert len(samples) == len(rows)
    for sample, row in zip(samples, rows, strict=True):
        exact = row.states[:, :-1].flatten(1).float()
        largest = row.states.abs().amax(dim=(1, 2)).float().unsqueeze(1)
        error = (sample["hidden_states"].float() - exact).abs()
        assert (error <= exact.abs() * 2**-4 + largest * 2**-16).all()  # a mantissa of 3 bits, a scale of 8
