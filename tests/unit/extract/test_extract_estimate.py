"""What is said of a run before it is loaded, and what is refused for want of room."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from vllm_compat.errors import StorageError, UsageError
from vllm_compat.extract import ExtractConfig, estimate, extract, kvcache
from vllm_compat.extract.done import read_done
from vllm_compat.extract.estimate import Estimate, estimate_of
from vllm_compat.extract.plan import make_plan
from vllm_compat.testing import FakeEngine

MakeConfig: TypeAlias = Callable[..., ExtractConfig]
MakeEngine: TypeAlias = Callable[..., FakeEngine]
WriteRows: TypeAlias = Callable[..., Path]

KIMI = {
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}
LLAMA_70B = {
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}


def room(**changes: int) -> Callable[[Path], os.statvfs_result]:
    """A file system of that room; the rest is as it is."""

    def statvfs(path: Path) -> os.statvfs_result:
        found = os.statvfs(path)
        names = [n for n in dir(found) if n.startswith("f_") and n != "f_fsid"]
        order = sorted(names, key=lambda n: _PLACES.index(n))
        return os.statvfs_result([changes.get(name, getattr(found, name)) for name in order])

    return statvfs


_PLACES = [
    "f_bsize",
    "f_frsize",
    "f_blocks",
    "f_bfree",
    "f_bavail",
    "f_files",
    "f_ffree",
    "f_favail",
    "f_flag",
    "f_namemax",
]


class _Os:
    """``os`` with another ``statvfs``, for the module under test alone."""

    def __init__(self, statvfs: Callable[[Path], os.statvfs_result]) -> None:
        self.statvfs = statvfs


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def put(**changes: int) -> None:
        monkeypatch.setattr(estimate, "os", _Os(room(**changes)))

    return put


def describe(model: Path, config: Mapping[str, Any]) -> None:
    (model / "config.json").write_text(json.dumps({"vocab_size": 1000, **config}), encoding="utf-8")


def rows(*lengths: int) -> list[dict[str, Any]]:
    return [{"input_ids": [7] * n} for n in lengths]


def test_kimi_at_four_layers_is_57344_bytes_a_token(config: MakeConfig, model: Path, write_rows: WriteRows) -> None:
    describe(model, {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": KIMI})
    write_rows(rows(100, 50, 64))
    found = estimate_of(config(layer_ids=(2, 30, 58, 60), tensor_parallel_size=8))
    assert found.state_bytes_per_token.value == 57_344
    assert (found.samples, found.tokens, found.truncated, found.longest) == (3, 64 + 50 + 64, 1, 64)
    assert (found.owed_samples, found.owed_tokens) == (3, 178)
    assert found.kv_bytes_per_token.value == 61 * 576 * 2  # the same on each of eight GPUs
    assert found.kv_bytes.value == 61 * 576 * 2 * 2 * 65


def test_the_files_are_as_large_as_was_said(config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows) -> None:
    """Against files that were written; half a block for each of them is of the file system, not of the file."""
    write_rows([{"input_ids": [7] * n, "loss_mask": [1] * n} for n in (64, 33, 1, 50)])
    asked = config(save_dtype="float32")
    before = estimate_of(asked)
    summary = extract(asked, make_engine())
    said = before.disk_bytes.value
    assert said is not None
    assert before.state_bytes_per_token.value == 3 * 8 * 4
    payload = before.tokens * (3 * 8 * 4 + 16)
    assert payload < summary.bytes < said < payload + 4 * (1024 + 4096)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"save_dtype": "float32"}, 3 * 8 * 4),
        ({"save_dtype": "bfloat16"}, 3 * 8 * 2),
        ({"save_dtype": "auto", "dtype": "float32"}, 3 * 8 * 4),
        ({"save_dtype": "auto"}, 3 * 8 * 2),
        ({"save_dtype": "auto", "dtype": "float64"}, None),
    ],
)
def test_bytes_of_states_by_dtype(
    config: MakeConfig, write_rows: WriteRows, changes: dict[str, Any], wanted: int | None
) -> None:
    write_rows(rows(5))
    found = estimate_of(config(**changes))
    assert found.state_bytes_per_token.value == wanted
    assert (found.disk_bytes.value is None) == (wanted is None)


def test_only_what_is_owed_counts(config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows) -> None:
    """A file that is gone is owed again; when all is done, nothing is written any more."""
    write_rows(rows(10, 20, 30))
    extract(config(), make_engine())
    found = estimate_of(config(), 10.0)
    assert (found.owed_samples, found.owed_tokens, found.disk_bytes.value) == (0, 0, 0)
    assert found.hours.value == 0
    (Path(config().output_dir) / "hs_1.safetensors").unlink()
    found = estimate_of(config(), 10.0)
    assert (found.owed_samples, found.owed_tokens) == (1, 20)
    assert found.hours.value == pytest.approx(20 / 10 / 3600)


def test_what_does_not_fit_is_refused_with_the_figures(
    config: MakeConfig, write_rows: WriteRows, on: Callable[..., None]
) -> None:
    write_rows(rows(64, 64))
    on(f_frsize=1, f_bavail=128 * (48 + 8) - 1, f_blocks=10**6)
    found = estimate_of(config())
    with pytest.raises(UsageError, match=r"GB free, and the states .* take .* GB\. Make room") as caught:
        found.require_room()
    assert caught.value.exit_code == 2
    assert "refused: " in str(found)
    on(f_frsize=1, f_bavail=128 * (48 + 8), f_blocks=10**6)  # headers apart it might do
    found = estimate_of(config())
    found.require_room()
    assert len(found.warnings) == 1
    on(f_frsize=1, f_bavail=10**6, f_blocks=10**6)
    assert estimate_of(config()).warnings == ()


def test_the_same_fits_once_enough_of_it_is_done(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, on: Callable[..., None]
) -> None:
    write_rows(rows(64, 64))
    extract(config(), make_engine())
    (Path(config().output_dir) / "hs_1.safetensors").unlink()
    on(f_frsize=1, f_bavail=64 * (48 + 8), f_blocks=10**6)
    found = estimate_of(config())
    assert (found.tokens, found.owed_tokens, found.refusal) == (128, 64, "")
    found.require_room()


def test_one_file_a_sample_must_fit_too(config: MakeConfig, write_rows: WriteRows, on: Callable[..., None]) -> None:
    write_rows(rows(*[1] * 10))
    on(f_files=100, f_favail=9)
    with pytest.raises(UsageError, match="9 more files, and 10 samples"):
        estimate_of(config()).require_room()
    on(f_files=100, f_favail=11)
    assert "11 more files" in "".join(estimate_of(config()).warnings)
    on(f_files=0, f_favail=0)  # btrfs and others have no limit, and say so
    found = estimate_of(config())
    assert (found.refusal, found.free_files.value) == ("", None)


def test_a_file_system_that_does_not_tell_its_room_is_not_refused(
    config: MakeConfig, write_rows: WriteRows, on: Callable[..., None]
) -> None:
    write_rows(rows(64))
    on(f_blocks=0, f_bavail=0)
    found = estimate_of(config())
    assert (found.free_bytes.value, found.refusal) == (None, "")
    assert "free: unknown" in str(found)


def test_a_file_system_that_fails(config: MakeConfig, write_rows: WriteRows, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> os.statvfs_result:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    write_rows(rows(5))
    monkeypatch.setattr(estimate, "os", _Os(fail))
    with pytest.raises(StorageError):
        estimate_of(config())


@pytest.mark.parametrize(
    ("described", "changes", "wanted"),
    [
        (LLAMA_70B, {"tensor_parallel_size": 4}, 80 * 2 * 2 * 128 * 2),
        (LLAMA_70B, {"tensor_parallel_size": 16}, 80 * 2 * 1 * 128 * 2),  # a KV head is never split
        (LLAMA_70B, {"dtype": "float32"}, 80 * 2 * 8 * 128 * 4),
        (LLAMA_70B, {"engine_options": {"kv_cache_dtype": "fp8"}}, 80 * 2 * 8 * 128),
        (LLAMA_70B, {"engine_options": {"kv_cache_dtype": "turboquant"}}, None),
        ({**LLAMA_70B, "head_dim": 64}, {}, 80 * 2 * 8 * 64 * 2),
        ({**LLAMA_70B, "num_key_value_heads": None}, {}, None),
        ({k: v for k, v in LLAMA_70B.items() if k != "num_key_value_heads"}, {}, 80 * 2 * 64 * 128 * 2),
        ({**LLAMA_70B, "layer_types": ["linear_attention"] * 60 + ["full_attention"] * 20}, {}, 20 * 2 * 8 * 128 * 2),
        ({**LLAMA_70B, "layer_types": ["sliding_attention", "full_attention"] * 40}, {}, 80 * 2 * 8 * 128 * 2),
        ({**LLAMA_70B, "full_attention_interval": 4}, {}, None),
        (KIMI, {"engine_options": {"kv_cache_dtype": "fp8"}}, 61 * 576),
        ({"hidden_size": 8}, {}, None),
    ],
)
def test_kv_cache_of_a_token(
    config: MakeConfig, model: Path, described: dict[str, Any], changes: dict[str, Any], wanted: int | None
) -> None:
    describe(model, described)
    found, how = kvcache.kv_bytes_per_token(config(**changes))
    assert found == wanted
    assert how


def test_no_mla_no_figure(config: MakeConfig, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    describe(model, KIMI)
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    assert kvcache.kv_bytes_per_token(config()) == (None, "MLA is switched off by VLLM_MLA_DISABLE")


def test_a_model_that_is_not_here_leaves_figures_unknown_and_says_why(
    config: MakeConfig, write_rows: WriteRows
) -> None:
    write_rows(rows(5))
    found = estimate_of(config(model="someone/something"), 100.0)
    for figure in (found.state_bytes_per_token, found.disk_bytes, found.kv_bytes, found.host_bytes):
        assert figure.value is None
        assert "someone/something" in figure.how
    assert found.disk_bytes_per_second.value is None
    assert found.hours.value == pytest.approx(5 / 100 / 3600)
    assert "unknown: someone/something has no config.json" in str(found)


def test_time_is_unknown_without_a_rate_and_computed_with_one(config: MakeConfig, write_rows: WriteRows) -> None:
    write_rows(rows(64, 36))
    without = estimate_of(config())
    assert without.hours.value is None
    assert "give --tokens-per-second" in str(without)
    with_one = estimate_of(config(), 50.0)
    assert with_one.hours.value == pytest.approx(2 / 3600)
    assert with_one.samples_per_second.value == pytest.approx(1.0)
    assert with_one.disk_bytes.value is not None
    assert with_one.disk_bytes_per_second.value == pytest.approx(with_one.disk_bytes.value / 2)
    assert "which you gave" in with_one.hours.how


@pytest.mark.parametrize("rate", [0.0, -5.0, float("nan")])
def test_a_rate_that_is_none(config: MakeConfig, write_rows: WriteRows, rate: float) -> None:
    write_rows(rows(5))
    with pytest.raises(UsageError, match="must be above 0"):
        estimate_of(config(), rate)


def test_a_shard_has_its_share_of_the_time(config: MakeConfig, write_rows: WriteRows) -> None:
    write_rows(rows(10, 10, 10, 10))
    found = estimate_of(config(shard=(1, 4)), 10.0)
    assert found.owed_tokens == 40
    assert found.hours.value == pytest.approx(1 / 3600)
    assert "25.0% of what is owed" in found.hours.how


def test_host_memory_is_bounded_by_batch_pending_and_writers(config: MakeConfig, write_rows: WriteRows) -> None:
    write_rows(rows(64))
    found = estimate_of(config(batch_size=4, writers=3, max_pending_bytes=10_000, dtype="float32"))
    captured = 64 * 3 * 8 * 4
    assert found.host_bytes.value == 2 * 4 * captured + 10_000 + 3 * 3 * 64 * 48


def test_nothing_is_written_and_all_of_it_is_json(config: MakeConfig, write_rows: WriteRows) -> None:
    write_rows(rows(5))
    asked = config()
    plan = make_plan(asked)
    done, _ = read_done(plan.output_dir, plan.input.num_samples)
    found: Estimate = estimate.estimate(plan, asked, done, 3.0)
    assert list(plan.output_dir.iterdir()) == []
    plain = json.loads(json.dumps(found.as_dict()))
    assert plain["state_bytes_per_token"] == {"value": 48, "how": "3 layers x 8 x 2 bytes"}
    assert plain["refusal"] == ""


def test_answers_count_as_if_they_were_the_longest(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, on: Callable[..., None]
) -> None:
    """What is owed is prompts and answers, half-way too; nothing is refused for answers that may be short."""
    write_rows([{"input_ids": [n] * 10} for n in range(4)])
    asked = config(generate=20, save_dtype="float32")
    before = estimate_of(asked)
    assert (before.owed_samples, before.owed_tokens) == (4, 4 * (10 + 20))
    summary = extract(asked, make_engine())
    assert summary.tokens <= before.owed_tokens
    (Path(asked.output_dir) / "hs_2.safetensors").unlink()
    on(f_bavail=0)
    again = estimate_of(asked)
    assert (again.owed_samples, again.owed_tokens, again.refusal) == (1, 30, "")
    assert again.warnings
