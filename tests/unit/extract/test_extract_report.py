"""What a run says at its end, for those who train on it and serve what comes of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_compat.extract.record import Summary
from vllm_compat.extract.report import log_summary

TRAINER = "for speculators' trainer, which writes other layers there by default: --target-layer-ids 3 31 59"


def summary(**changes: Any) -> Summary:
    values: dict[str, Any] = {f.name: 0 for f in dataclasses.fields(Summary)}
    return Summary(**(values | {"complete": True, "output_dir": "out"} | changes))


@pytest.mark.parametrize(
    ("name", "complete", "num_layers", "said"),
    [
        ("speculators", True, 61, True),
        ("speculators-fp8", True, 61, True),
        ("speculators", False, 61, False),
        ("speculators", True, None, False),
        ("speculators-v1", True, 61, False),  # those trainers write no ids
        ("safetensors", True, 61, False),
    ],
)
def test_the_trainers_option_is_said_where_its_default_is_another(
    name: str, complete: bool, num_layers: int | None, said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    plan: Any = SimpleNamespace(output_dir=Path("out"), layer_ids=(2, 30, 58, 60), format=SimpleNamespace(name=name))
    with caplog.at_level("INFO", "vllm_compat"):
        log_summary(plan, summary(complete=complete), num_layers)
    assert (TRAINER in caplog.messages) == said
