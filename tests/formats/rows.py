"""What the tests write and expect back: samples with states that no other sample, layer or token has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_compat.testing import fake_row

NUM_LAYERS, HIDDEN_SIZE, VOCABULARY = 6, 8, 1000
LAYER_IDS = (4, 1, 3, 5)
"""As asked for, not ascending; the last one is the final state."""
LENGTHS = (7, 3, 12, 2, 9, 5, 16, 4, 3, 8, 6, 11)


@dataclass(frozen=True, eq=False)
class Row:
    """One sample.

    Attributes:
        token_ids: int64 [tokens].
        loss_mask: int64 [tokens].
        states: bfloat16 [tokens, layers, hidden_size]; the last layer is the final state.
    """

    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    states: torch.Tensor

    def __len__(self) -> int:
        return len(self.token_ids)


def make_rows(lengths: Sequence[int] = LENGTHS) -> list[Row]:
    """Rows whose first half is the prompt, with the states that ``FakeEngine`` has for their tokens."""
    random = torch.Generator().manual_seed(7)
    rows = []
    for length in lengths:
        token_ids = torch.randint(3, 60, (length,), generator=random)  # few, so that some are frequent
        tokens = token_ids.tolist()
        states = [[fake_row(k, tokens[: at + 1], HIDDEN_SIZE) for k in LAYER_IDS] for at in range(length)]
        rows.append(Row(token_ids, (torch.arange(length) >= length // 2).long(), torch.tensor(states).bfloat16()))
    return rows


def as_sample(row: Row, *, shifted: bool) -> dict[str, Any]:
    """What a dataset of speculators makes of a row.

    Args:
        row: as it was written.
        shifted: EAGLE-3's alignment: the state of a token stands beside the token after it, with that token's target.
    """
    after, before = (slice(1, None), slice(None, -1)) if shifted else (slice(None), slice(None))
    return {
        "input_ids": row.token_ids[after],
        "hidden_states": row.states[before, :-1].flatten(1),
        "verifier_last_hidden_states": row.states[after, -1],
        "loss_mask": row.loss_mask[after],
        "lengths": torch.tensor([len(row) - shifted]),
        "position_ids": torch.arange(len(row))[after],
    }


def as_batch(rows: Sequence[Row], max_len: int) -> dict[str, torch.Tensor]:
    """What a collate function makes of rows: all of them in one line, cut or filled up with zeros to ``max_len``.

    ``document_ids`` says whose each place is, -1 for none.
    """
    samples = [as_sample(row, shifted=True) for row in rows]
    line = {key: torch.cat([sample[key] for sample in samples]) for key in samples[0] if key != "lengths"}
    line["document_ids"] = torch.cat([torch.full((len(row) - 1,), at) for at, row in enumerate(rows)])
    batch = {}
    for key, values in line.items():
        missing = max(0, max_len - len(values))
        filling = torch.full((missing, *values.shape[1:]), -1 if key == "document_ids" else 0, dtype=values.dtype)
        batch[key] = torch.cat([values[:max_len], filling]).unsqueeze(0)
    return batch


def flip_sign(file: Path, states: torch.Tensor) -> None:
    """Flip the sign of the last of some states where a file has them."""
    content, values = bytearray(file.read_bytes()), states.view(torch.uint8).numpy().tobytes()
    assert content.count(values) == 1
    content[content.index(values) + len(values) - 1] ^= 0x80
    file.write_bytes(content)
