"""The rehearsal but for vLLM: which layers are built, what is extracted and compared, and the process it runs in."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from vllm_compat._engine.kinds import MOST_LAYERS, first_layers
from vllm_compat.errors import CaptureError, UnsupportedVllmError
from vllm_compat.extract import ExtractConfig, rehearsal, stage
from vllm_compat.extract.locks import LOCK_FILE
from vllm_compat.extract.plan import Plan, make_plan
from vllm_compat.extract.rehearsal import Rehearsal, RehearsalError, rehearse
from vllm_compat.extract.stage import make_rows, play
from vllm_compat.testing import FakeEngine
from vllm_compat.types import LayerId

MakeConfig: TypeAlias = Callable[..., ExtractConfig]
MakeEngine: TypeAlias = Callable[..., FakeEngine]
WriteRows: TypeAlias = Callable[..., Path]

S, F = "sliding_attention", "full_attention"


@pytest.fixture
def plan(config: MakeConfig, write_rows: WriteRows) -> Plan:
    write_rows([{"input_ids": [7] * 5}])
    return make_plan(config())


def beside(plan: Plan) -> list[str]:
    """Names beside and in the output folder, without what the fixtures put there."""
    names = (path.name for path in (*plan.output_dir.parent.iterdir(), *plan.output_dir.iterdir()))
    return sorted(set(names) - {"model", "data.jsonl", "out"})


# The layers.


@pytest.mark.parametrize(
    ("fields", "of", "layer_ids", "num_layers", "places"),
    [
        ({}, 32, (2, 16, 29, 31), 4, (0, 1, 2, 3)),
        ({}, 32, (2, 16, 29, "norm"), 4, (0, 1, 2, "norm")),  # the last layer is not asked for: it gets no id
        ({}, 32, (31, 2), 2, (1, 0)),  # the order is kept
        ({}, 32, ("norm",), 2, ("norm",)),
        ({}, 4, (0, 1, 2, 3), 4, (0, 1, 2, 3)),  # nothing to cut
        ({}, 1, (0,), 1, (0,)),
        ({"first_k_dense_replace": 1}, 61, (60,), 2, (1,)),  # Kimi-K2.5: a dense layer and one of experts
        ({"first_k_dense_replace": 3, "moe_layer_freq": 1}, 61, (30, 60), 4, (2, 3)),  # DeepSeek-V3
        ({"first_k_dense_replace": 0, "moe_layer_freq": 1}, 61, (30, 60), 2, (0, 1)),
        ({"interleave_moe_layer_step": 2, "no_rope_layer_interval": 4}, 48, (47,), 4, (3,)),  # Llama 4
        ({"full_attention_interval": 4}, 48, (10, 47), 4, (2, 3)),  # Qwen3-Next
        ({"_sliding_window_pattern": 6}, 34, (33,), 6, (5,)),  # Gemma 3
        ({"layer_types": [S, S, S, F] * 8}, 32, (31,), 4, (3,)),
        ({"layer_types": [F] * 32}, 32, (31,), 2, (1,)),
        ({"layer_types": [F] * 32}, 32, (5,), 2, (0,)),  # the last but one, as it is not the last that is asked for
        ({"layer_types": [S, S, S, F] * 8}, 32, (5, "norm"), 5, (3, "norm")),  # and then of every kind, too
        ({"attn_layer_indices": [9, 18, 27]}, 32, (31,), 10, (9,)),  # Bamba
        ({"mlp_only_layers": [0, 1]}, 32, (31,), 3, (2,)),
        ({"mlp_only_layers": []}, 32, (31,), 2, (1,)),
        ({"moe_layers_enum": "4,5,6,7"}, 8, (7,), 5, (4,)),  # Step 3
        ({"linear_attn_config": {"full_attn_layers": [4, 8], 3: 1}}, 8, (7,), 5, (4,)),  # Kimi Linear
        ({"hybrid_override_pattern": "M-M*" * 8}, 32, (31,), 4, (3,)),  # Nemotron-H
        ({"bos_token_id": list(range(8))}, 8, (7,), 2, (1,)),
        ({"intermediate_size": list(range(100, 132))}, 32, (31,), 2, (1,)),  # sizes, not kinds
        ({"layer_types": [S, F] * 16, "num_kv_shared_layers": 10}, 32, (31,), 3, (2,)),  # Gemma 3n
    ],
)
def test_the_fewest_first_layers_that_show_every_kind(
    fields: dict[str, Any], of: int, layer_ids: Sequence[LayerId], num_layers: int, places: Sequence[LayerId]
) -> None:
    found = first_layers(fields, of, layer_ids)
    assert (found.num_layers, found.of, found.layer_ids, found.unseen) == (num_layers, of, places, ())


def test_lists_are_cut_with_the_number_and_all_else_is_left() -> None:
    fields = {
        "num_hidden_layers": 8,
        "layer_types": [S, F] * 4,
        "no_rope_layers": (1, 0) * 4,
        "hybrid_override_pattern": "M*M*M*M*",
        "model_type": "eightish",  # text of that length, which is no pattern
        "eos_token_id": [1, 2, 3, 4, 5, 6, 7, 8],
        "first_k_dense_replace": 1,
        "rope_scaling": {"factor": 8},
    }
    assert first_layers(fields, 8, (7,)).changes == {
        "num_hidden_layers": 2,
        "layer_types": [S, F],
        "no_rope_layers": (1, 0),
        "hybrid_override_pattern": "M*",
    }


def test_layers_that_share_a_cache_still_do() -> None:
    found = first_layers({"layer_types": [S, S, F] * 4, "num_kv_shared_layers": 6}, 12, (11,))
    assert found.changes == {"num_hidden_layers": 4, "layer_types": [S, S, F, S], "num_kv_shared_layers": 1}


def test_what_comes_too_late_is_named_and_not_built() -> None:
    found = first_layers({"layer_types": [S] * 40 + [F] * 20}, 60, (2, 59))
    assert (found.num_layers, found.unseen) == (2, ("layer_types, from layer 40 on",))


def test_more_ids_than_layers_are_built() -> None:
    found = first_layers({}, 61, tuple(range(61)))
    assert found.num_layers == MOST_LAYERS
    assert found.layer_ids == tuple(range(MOST_LAYERS))
    found = first_layers({}, 61, (*range(60), "norm"))
    assert found.layer_ids == (*range(MOST_LAYERS), "norm")
    assert found.num_layers == MOST_LAYERS + 1


# The rows.


def test_rows_show_one_token_a_few_and_more_than_a_step_takes() -> None:
    rows = make_rows(2048, 512, 1000)
    assert [len(row["input_ids"]) for row in rows] == [512 + 33, 1, 5, 33]
    assert all(len(row["loss_mask"]) == len(row["input_ids"]) for row in rows)
    assert [len(row["input_ids"]) for row in make_rows(300, 512, 1000)] == [300, 1, 5, 33]  # none of the run is longer
    assert [len(row["input_ids"]) for row in make_rows(1, 512, 1000)] == [1]
    assert max(len(row["input_ids"]) for row in make_rows(10**6, 10**6, 1000)) == stage.LONGEST


def test_rows_have_no_token_with_a_meaning_of_its_own() -> None:
    special = frozenset(range(25, 45))
    used = {token for row in make_rows(2048, 512, 100, special) for token in row["input_ids"]}
    assert used == set(range(45, 50))
    assert {token for row in make_rows(9, 9, 2, frozenset({0, 1})) for token in row["input_ids"]} == {0}


# What is extracted and compared.


@pytest.mark.parametrize("form", ["safetensors", "per-layer"])
def test_rows_are_extracted_read_back_and_compared(
    form: str, config: MakeConfig, make_engine: MakeEngine, tmp_path: Path
) -> None:
    """With the engine's own layers, whatever the model's folder says."""
    folder = tmp_path / "rehearsal"
    folder.mkdir()
    engine = make_engine(layer_ids=(1, 0, "norm"), num_layers=2, hidden_size=4)
    asked = config(format=form, save_dtype="float32", num_samples=1, shard=(3, 4))
    played = play(asked, engine, make_rows(64, 50, 1000), folder)
    assert (played.samples, played.tokens, played.longest, played.nonfinite) == (4, 64 + 1 + 5 + 33, 64, 0)
    assert len(list((folder / "out").glob("hs_*"))) == 4
    assert not Path(asked.output_dir).exists()


def test_states_that_are_not_finite_are_counted(config: MakeConfig, make_engine: MakeEngine, tmp_path: Path) -> None:
    def tensor(rows: list[list[float]]) -> Any:
        return np.full((5, 8), np.inf) if len(rows) == 5 else np.array(rows)

    engine = make_engine(make_tensor=tensor)
    assert play(config(save_dtype="float32"), engine, make_rows(64, 50, 1000), tmp_path).nonfinite == 1


def test_another_dtype_than_asked_for_is_found(config: MakeConfig, make_engine: MakeEngine, tmp_path: Path) -> None:
    """numpy has no bfloat16, so float32 is saved: a true difference between what was asked for and what is there."""
    with pytest.raises(CaptureError, match="dtype 'float32' was read back, 'bfloat16' went in"):
        play(config(save_dtype="bfloat16"), make_engine(), make_rows(64, 50, 1000), tmp_path)


# The process.


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_it_says_so_with_the_exit_code_of_that(config: MakeConfig, plan: Plan) -> None:
    """The whole way through the other process and back: there is no vLLM in this environment."""
    with pytest.raises(RehearsalError, match=r"no vLLM is installed .*Nothing was loaded .*--no-rehearsal") as caught:
        rehearse(config(), plan, timeout_s=120)
    assert caught.value.exit_code == UnsupportedVllmError.exit_code
    assert beside(plan) == []


def test_a_long_one_is_told_of(
    config: MakeConfig, plan: Plan, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "vllm_compat")
    monkeypatch.setattr("vllm_compat.extract.rehearsal._TELL_EVERY_S", 0.01)
    with pytest.raises(RehearsalError, match=r"took more than 0\.05 s"):
        rehearse(config(), plan, timeout_s=0.05)
    assert 1 <= caplog.text.count("rehearsal: still at it after 0 s") <= 4


def test_it_is_given_up_after_a_time(config: MakeConfig, plan: Plan) -> None:
    with pytest.raises(RehearsalError, match=r"took more than 0\.01 s and was ended") as caught:
        rehearse(config(), plan, timeout_s=0.01)
    assert caught.value.exit_code == 1
    assert beside(plan) == []


def test_a_process_that_dies_leaves_its_last_lines(
    config: MakeConfig, plan: Plan, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rehearsal, "_STAGE", "vllm_compat.no_such_module")
    with pytest.raises(RehearsalError, match="its process ended with exit code 1"):
        rehearse(config(), plan)
    assert "No module named vllm_compat.no_such_module" in caplog.text
    assert beside(plan) == []


def test_settings_that_no_other_process_can_be_told(
    config: MakeConfig, plan: Plan, caplog: pytest.LogCaptureFixture
) -> None:
    asked = config(engine_options={"distributed_executor_backend": FakeEngine})
    assert rehearse(asked, plan) is None
    assert "NO REHEARSAL" in caplog.text
    assert caplog.records[-1].levelno == logging.WARNING


def test_what_a_killed_rehearsal_left_is_removed_and_a_living_one_is_not(config: MakeConfig, plan: Plan) -> None:
    left = plan.output_dir.parent / ".out.rehearsal-left"
    left.mkdir()
    (left / LOCK_FILE).touch()
    with rehearsal._folder(plan.output_dir) as living:
        (living / "sample").touch()
        with rehearsal._folder(plan.output_dir) as other:
            assert not left.exists()
            assert (living / "sample").exists()
            assert living.parent == other.parent == plan.output_dir.parent
    assert beside(plan) == []


def test_in_the_folder_itself_when_the_one_above_is_not_writable(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != plan.output_dir.parent and access(path, mode))
    with rehearsal._folder(plan.output_dir) as folder:
        assert folder.parent == plan.output_dir
        assert folder.name.startswith(".vllm-compat-rehearsal-")
    assert beside(plan) == []


def test_a_child_without_its_parent_ends_and_leaves_nothing(tmp_path: Path) -> None:
    """As after kill -9 of the run: the pipe closes, and a child that would wait for ever is gone with its folder."""
    folder = tmp_path / "folder"
    folder.mkdir()
    code = (
        "import sys, threading, time; from pathlib import Path; from vllm_compat.extract import stage;"
        "threading.Thread(target=stage._end_with_parent, args=(Path(sys.argv[1]),), daemon=True).start();"
        "print('ready', flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        child.stdin.close()
        assert child.wait(60) == -signal.SIGKILL
    assert not folder.exists()


def test_workers_of_the_child_end_with_it() -> None:
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    child.wait(60)
    os.killpg(child.pid, 0)  # the worker is alive
    start = time.monotonic()
    rehearsal._end_group(child)
    with pytest.raises(ProcessLookupError):
        os.killpg(child.pid, 0)
    assert time.monotonic() - start < rehearsal._GROUP_END_S


def test_the_stage_is_not_for_hands() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vllm_compat.extract.stage"], stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    assert done.returncode == 1
    assert b"is started by the rehearsal" in done.stderr


@pytest.mark.parametrize(
    ("told", "match", "code"),
    [
        ({"kind": "UsageError", "error": "no such option", "exit_code": 2}, "failed: no such option", 2),
        ({"kind": "StepError", "error": "a step failed", "exit_code": 75}, "failed: a step failed", 1),
        ({"kind": "RuntimeError", "error": "CUDA", "exit_code": None}, "failed: RuntimeError: CUDA", 1),
    ],
)
def test_exit_codes(told: dict[str, Any], match: str, code: int, tmp_path: Path) -> None:
    log = (tmp_path / "log").open("w+b")
    with log, pytest.raises(RehearsalError, match=match) as caught:
        raise rehearsal._told(told, log)
    assert caught.value.exit_code == code


def test_a_rehearsal_in_words() -> None:
    done = Rehearsal(2, 61, (0, 1), (), 4, 100, 61, True, 0, 1.0, 2.0, 3.4)
    assert str(done) == (
        "2 of 61 layers, 4 samples of 1 to 61 tokens, that one in several steps, written, read back and compared: 3 s"
    )
    assert json.dumps(done.layer_ids) == "[0, 1]"
