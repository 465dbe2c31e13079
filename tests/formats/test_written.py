"""What a release makes of the folders that it reads: samples and batches, value for value, whoever wrote them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from rows import Row, as_batch
from trainer import collate, document_ids, load_samples, matches
from writers import WRITERS

from conftest import RELEASE
from vllm_compat._detect.speculators import SpeculatorsRelease

Written: TypeAlias = tuple[str, Path]
_EXACT = [name for name in ("speculators-v1", "speculators") if name in RELEASE.formats]
_CASES = [(name, writer) for name in _EXACT for writer in WRITERS[name]]


@pytest.fixture(params=_CASES, ids="-".join)
def written(request: pytest.FixtureRequest, rows: Sequence[Row], tmp_path: Path) -> Written:
    """A format, and a folder of it."""
    name, writer = request.param
    WRITERS[name][writer](tmp_path / "data", rows)
    return name, tmp_path / "data"


def test_every_sample_is_what_was_written(written: Written, rows: Sequence[Row], release: SpeculatorsRelease) -> None:
    samples = load_samples(*written, release)
    assert len(samples) == len(rows)
    assert [at for at, row in enumerate(rows) if not matches(samples[at], row)] == []


@pytest.mark.parametrize("max_len", [200, 40])
def test_a_batch_is_what_was_written(
    max_len: int, written: Written, rows: Sequence[Row], release: SpeculatorsRelease
) -> None:
    batch = collate(load_samples(*written, release, hidden_states_dtype=torch.bfloat16), max_len)
    wanted = as_batch(rows, max_len)
    assert torch.equal(document_ids(batch, max_len), wanted.pop("document_ids"))
    assert [key for key, values in wanted.items() if not torch.equal(batch[key], values)] == []
