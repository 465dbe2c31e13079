"""Everything that can be refused, is refused before the model loads or before its first step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from vllm_compat.errors import InputError, StepError, UsageError
from vllm_compat.extract import extract

if TYPE_CHECKING:
    from tests.unit.extract.conftest import MakeConfig, MakeEngine, SomeRows, WriteRows


@pytest.mark.usefixtures("no_engine")
def test_a_bad_input_is_refused_first(config: MakeConfig, write_rows: WriteRows) -> None:
    write_rows([{"input_ids": [1]}, {"input_ids": [1000]}, {"input_ids": []}])
    with pytest.raises(InputError) as caught:
        extract(config())
    assert [p.line for p in caught.value.problems] == [2, 3]


@pytest.mark.usefixtures("no_engine")
def test_a_layer_that_is_not_there_is_refused_first(
    config: MakeConfig, write_rows: WriteRows, some_rows: SomeRows
) -> None:
    write_rows(some_rows(1))
    with pytest.raises(UsageError, match="layer id 8 is out of range"):
        extract(config(layer_ids=(8,)))


@pytest.mark.usefixtures("no_engine")
def test_a_format_that_is_not_there_or_does_not_suit_is_refused_first(
    config: MakeConfig, write_rows: WriteRows, some_rows: SomeRows
) -> None:
    write_rows(some_rows(1))
    with pytest.raises(UsageError, match="no format 'pickle'"):
        extract(config(format="pickle"))
    with pytest.raises(UsageError, match="speculators"):
        extract(config(format="speculators", layer_ids=(2, "norm")))
    assert not Path(config().output_dir).exists()


@pytest.mark.usefixtures("no_engine")
def test_the_package_for_checksums_is_asked_for_first(
    config: MakeConfig, write_rows: WriteRows, some_rows: SomeRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(some_rows(1))
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(UsageError, match=r"need the package xxhash .*vllm-compat\[extract\]"):
        extract(config())


@pytest.mark.usefixtures("no_engine")
def test_samples_of_an_earlier_run_are_refused_first(
    config: MakeConfig, write_rows: WriteRows, some_rows: SomeRows
) -> None:
    write_rows(some_rows(1))
    old = Path(config().output_dir) / "hs_77.safetensors"
    old.parent.mkdir()
    old.write_bytes(b"old")
    with pytest.raises(UsageError, match=r"hs_77\.safetensors.*another output folder, or move"):
        extract(config())
    assert old.read_bytes() == b"old"
    assert not (old.parent / "run.json").exists()


@pytest.mark.usefixtures("no_engine")
def test_an_output_that_is_a_file_is_refused_first(
    config: MakeConfig, write_rows: WriteRows, some_rows: SomeRows
) -> None:
    path = write_rows(some_rows(1))
    with pytest.raises(UsageError, match="cannot be used"):
        extract(config(output_dir=path))
    with pytest.raises(UsageError, match="cannot be used"):
        extract(config(output_dir=path / "below"))


def test_a_failed_run_without_samples_can_be_repeated(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, some_rows: SomeRows
) -> None:
    write_rows(some_rows(3))
    with pytest.raises(StepError):
        extract(config(), make_engine(fail_at_step=0))
    assert extract(config(), make_engine()).samples == 3


def test_what_only_the_engine_knows_is_checked_before_its_first_step(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, model: Path
) -> None:
    (model / "config.json").write_text("{}")
    write_rows([{"input_ids": [1] * 9}, {"input_ids": [1, 500]}])
    with pytest.raises(InputError, match="line 2: input_ids has 500") as caught:
        extract(config(), make_engine(vocab_size=500, fail_at_step=0))
    assert [p.line for p in caught.value.problems] == [2]
    with pytest.raises(UsageError, match="Lower max_seq_len to 8"):
        extract(config(), make_engine(max_model_len=9, fail_at_step=0))
    with pytest.raises(UsageError, match="layer id 2 is out of range"):
        extract(config(), make_engine(layer_ids=(0,), num_layers=2, fail_at_step=0))
    assert extract(config(), make_engine(vocab_size=501, max_model_len=10)).samples == 2
