"""A run of the extraction's command over real text, for its own tests and for what is tested on its files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conftest import text

LENGTHS = (40, 3, 150, 41, 300, 7, 64, 12, 90, 5, 33, 2)  # 12, more than the batch holds; one longer than is kept
KEPT = 256
_TOPICS = ("comparisons", "numeric-types", "strings")


def rows_of_text(model: Path) -> list[dict[str, Any]]:
    """English for a trained model, as rows of the input."""
    return [{"input_ids": text(model, n, _TOPICS[i % 3]), "id": f"row {i}"} for i, n in enumerate(LENGTHS)]


def run_extract(
    model: Path, folder: Path, rows: Sequence[dict[str, Any]], *options: str
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The output folder of a run that ended well, and what it printed."""
    data, output = folder / "tokenized_data.jsonl", folder / "states"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["-m", "vllm_compat.extract", "--model-path", str(model), "--prepared-data", str(data)]
    command += ["--output-dir", str(output), "--max-seq-len", str(KEPT), *options]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return output, done
