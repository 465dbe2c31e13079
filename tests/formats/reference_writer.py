"""The formats of speculators as its own scripts write them, and not one line of ours: the measure for our writers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from rows import Row
from safetensors.torch import save_file

__all__ = ["write_arrow", "write_speculators", "write_speculators_fp8", "write_speculators_v1"]

FLOAT8_MAX = 448.0


def write_speculators_v1(folder: Path, rows: Sequence[Row]) -> None:
    """``data_{i}.pt``, and ``sample_lengths.json`` beside them."""
    folder.mkdir(parents=True)
    for index, row in enumerate(rows):
        sample = {
            "input_ids": row.token_ids,
            "hidden_states": [layer.contiguous() for layer in row.states.unbind(1)],
            "loss_mask": row.loss_mask,
        }
        torch.save(sample, folder / f"data_{index}.pt")
    lengths = {str(index): len(row) for index, row in enumerate(rows)}
    (folder / "sample_lengths.json").write_text(json.dumps(lengths))


def write_speculators(folder: Path, rows: Sequence[Row]) -> None:
    """An arrow dataset, and ``hidden_states/hs_{i}.safetensors``."""
    write_arrow(folder, rows)
    for index, row in enumerate(rows):
        _write_states(folder, index, {"hidden_states": row.states.contiguous(), "token_ids": row.token_ids})


def write_speculators_fp8(folder: Path, rows: Sequence[Row]) -> None:
    """The same in float8 with a float32 scale for each token, as hs-connectors 0.9 has it."""
    write_arrow(folder, rows)
    for index, row in enumerate(rows):
        exact = row.states.float()
        scales = (exact.abs().amax(dim=(1, 2), keepdim=True) / FLOAT8_MAX).clamp(min=1e-12)
        tensors = {
            "hidden_states": (exact / scales).to(torch.float8_e4m3fn),
            "hidden_states_scales": scales,
            "token_ids": row.token_ids,
        }
        _write_states(folder, index, tensors)


def write_arrow(folder: Path, rows: Sequence[Row]) -> None:
    """The prepared data, without states."""
    from datasets import Dataset

    columns = {
        "input_ids": [row.token_ids.tolist() for row in rows],
        "loss_mask": [row.loss_mask.tolist() for row in rows],
        "seq_len": [len(row) for row in rows],
    }
    dataset = Dataset.from_dict(columns)
    dataset.set_format(type="torch")  # kept in state.json: the trainer takes tensors from the columns
    dataset.save_to_disk(str(folder))
    supervised = Counter(t for row in rows for t in row.token_ids[row.loss_mask == 1].tolist())
    torch.save(dict(supervised), folder / "token_freq.pt")


def _write_states(folder: Path, index: int, tensors: dict[str, torch.Tensor]) -> None:
    (folder / "hidden_states").mkdir(exist_ok=True)
    save_file(tensors, folder / "hidden_states" / f"hs_{index}.safetensors")
