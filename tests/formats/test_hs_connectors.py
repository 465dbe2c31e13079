"""The file of each sample by hs-connectors' own reader, which speculators has had beside it since 0.7."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from rows import Row
from writers import WRITERS


@pytest.fixture(scope="module")
def connectors() -> Any:
    """The package, on its own or as 0.7 brings it along."""
    for name in ("hs_connectors", "speculators._vendor.hs_connectors"):
        try:
            return import_module(name)
        except ImportError:
            continue
    pytest.skip("this release has no hs-connectors")


@pytest.mark.parametrize("writer", ["reference", "ours"])
def test_each_file_is_its_own_row(writer: str, connectors: Any, tmp_path: Path, rows: Sequence[Row]) -> None:
    WRITERS["speculators"][writer](tmp_path / "data", rows)
    transfer = connectors.FileTransfer(tmp_path / "data" / "hidden_states")
    for number, row in enumerate(rows):
        found = transfer.get_cached(number)
        assert torch.equal(found["token_ids"], row.token_ids)
        assert torch.equal(found["hidden_states"], row.states)
    assert transfer.get_cached(len(rows)) is None
