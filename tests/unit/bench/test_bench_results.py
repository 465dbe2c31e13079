"""What the benchmark makes of its turns: the measure, ratios of the same turn, what is a loss and what says nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from benchmarks.bench.ratios import baseline_of, summarize
from benchmarks.bench.regress import MismatchError, losses
from benchmarks.bench.report import markdown


def turn(number: int, case: str, seconds: float, **facts: Any) -> dict[str, Any]:
    return {
        "turn": number,
        "case": case,
        "tokens": 1000,
        "seconds": seconds,
        "tokens_per_second": 1000 / seconds,
        **facts,
    }


TURNS = [
    turn(0, "plain-eager", 10.0),
    turn(0, "plain-compiled", 8.0),
    turn(0, "extract", 10.0, mb_per_second=5.0, stalled_seconds=0.1),
    turn(1, "extract", 20.0, mb_per_second=2.5, stalled_seconds=0.3),
    turn(1, "plain-compiled", 16.0),
    turn(1, "plain-eager", 10.0),
    turn(2, "plain-eager", 10.0),
    turn(2, "plain-compiled", 8.0),
    turn(2, "extract", 8.0, mb_per_second=6.0, stalled_seconds=0.0),
]


def result(turns: list[dict[str, Any]] = TURNS, **changes: Any) -> dict[str, Any]:
    settings = {"prompts": 4, "length": 250, "layers": [2, 5], "max_num_seqs": 4, "max_num_batched_tokens": 500}
    return {
        "machine": {"devices": [], "processor": "a processor", "cores": 2},
        "versions": {"vllm_version": "0.16.0"},
        "model": "a model, bfloat16",
        "settings": {**settings, "warmup": 1, "kv_cache_gib": 1},
        "asked": ["plain-eager", "plain-compiled", "extract"],
        "turns_asked": 3,
        "baseline": baseline_of(turns),
        "cases": summarize(turns),
        "not_available": {},
        "failed": {},
        "notes": {},
        "note": "",
        **changes,
    }


def test_the_measure_is_the_faster_of_vllm_s_own_by_the_median() -> None:
    assert baseline_of(TURNS) == "plain-compiled"
    assert baseline_of([t for t in TURNS if t["case"] != "plain-compiled"]) == "plain-eager"
    assert baseline_of([t for t in TURNS if t["case"] == "extract"]) == ""


def test_a_ratio_is_to_the_measure_of_the_same_turn() -> None:
    """A machine that was slow in one turn was slow for both."""
    found = summarize(TURNS)["extract"]
    assert found["ratio"] == {"median": 0.8, "min": 0.8, "max": 1.0}
    assert found["tokens_per_second"] == {"median": 100.0, "min": 50.0, "max": 125.0}
    assert found["stalled_seconds"] == {"median": 0.1, "min": 0.0, "max": 0.3}


def test_a_turn_without_its_measure_has_no_ratio() -> None:
    turns = [t for t in TURNS if (t["turn"], t["case"]) != (1, "plain-compiled")]
    assert summarize(turns)["extract"]["ratio"] == {"median": 0.9, "min": 0.8, "max": 1.0}


@pytest.mark.parametrize(
    ("factor", "tolerance", "lost"), [(1.0, 0.0, 0), (1.04, 0.05, 0), (1.2, 0.05, 1), (0.5, 0.05, 0)]
)
def test_a_loss_is_a_lower_ratio(factor: float, tolerance: float, lost: int) -> None:
    slower = [t | {"seconds": t["seconds"] * factor} if t["case"] == "extract" else t for t in TURNS]
    assert len(losses(result(), result(slower), tolerance)) == lost


def test_a_case_that_does_not_run_any_more_is_a_loss() -> None:
    without = result([t for t in TURNS if t["case"] != "extract"])
    assert losses(result(), without, 0.05) == ["extract: 0.800 then, and now it does not run"]
    assert losses(result(), without | {"asked": ["plain-eager", "plain-compiled"]}, 0.05) == [], "it was not asked for"


@pytest.mark.parametrize(
    ("name", "value"), [("length", 100), ("layers", [2]), ("max_num_seqs", 8), ("max_num_batched_tokens", 64)]
)
def test_other_settings_say_nothing_of_each_other(name: str, value: Any) -> None:
    other = copy.deepcopy(result())
    other["settings"][name] = value
    with pytest.raises(MismatchError, match=name):
        losses(result(), other, 0.05)


def test_how_long_it_warmed_up_does_not_matter_and_the_model_and_the_measure_do() -> None:
    other = copy.deepcopy(result())
    other["settings"]["warmup"] = 9
    assert losses(result(), other, 0.0) == []
    with pytest.raises(MismatchError, match="model"):
        losses(result(), result(model="another"), 0.0)
    with pytest.raises(MismatchError, match="measured against"):
        losses(result(), result(asked=["plain-eager", "extract"]), 0.0)


def test_the_table_has_every_case_and_what_did_not_run() -> None:
    table = markdown(
        result(not_available={"native": "no | GPU"}, failed={"speculators": "it\nbroke"}, notes={"extract": ["a note"]})
    )
    assert "| `extract` | 100 (50-125) | 0.800 (0.800-1.000) | 5 (2-6) | 0.10 (0.00-0.30) |" in table
    assert "| `native` | not available: no / GPU |" in table
    assert "| `speculators` | failed: it broke |" in table
    assert "- `extract`: a note." in table
    assert "1 is `plain-compiled` of the same turn" in table
    assert all(line.count("|") == 6 for line in table.splitlines() if line.startswith("|"))
