"""Who writes the folders that speculators reads: format -> name -> ``write(folder, rows)``.

Every test of a format runs with each of its writers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from reference_writer import write_speculators, write_speculators_fp8, write_speculators_v1
from rows import HIDDEN_SIZE, LAYER_IDS, NUM_LAYERS, VOCABULARY, Row

from vllm_compat.extract import ExtractConfig, extract
from vllm_compat.testing import FakeEngine

__all__ = ["WRITERS", "Writer"]

Writer: TypeAlias = Callable[[Path, Sequence[Row]], None]


def _ours(name: str) -> Writer:
    """``python -m vllm_compat.extract --format NAME`` with an engine whose states are those of the rows."""

    def write(folder: Path, rows: Sequence[Row]) -> None:
        prepared = folder.with_name("tokenized_data.jsonl")
        lines = [json.dumps({"input_ids": r.token_ids.tolist(), "loss_mask": r.loss_mask.tolist()}) for r in rows]
        prepared.write_text("\n".join(lines))
        config = ExtractConfig("a-model", prepared, folder, layer_ids=LAYER_IDS, format=name)
        engine = FakeEngine(
            LAYER_IDS, num_layers=NUM_LAYERS, hidden_size=HIDDEN_SIZE, vocab_size=VOCABULARY, make_tensor=torch.tensor
        )
        extract(config, engine)

    return write


WRITERS: Mapping[str, Mapping[str, Writer]] = {
    "speculators-v1": {"reference": write_speculators_v1, "ours": _ours("speculators-v1")},
    "speculators": {"reference": write_speculators, "ours": _ours("speculators")},
    "speculators-fp8": {"reference": write_speculators_fp8, "ours": _ours("speculators-fp8")},
}
