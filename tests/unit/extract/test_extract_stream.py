"""``stream``: what the files of a run have, without files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import vllm_compat.engine
from vllm_compat.errors import NonFiniteError, UsageError
from vllm_compat.extract import extract, stream
from vllm_compat.formats import get_format
from vllm_compat.testing import FakeEngine, FakeRequest

if TYPE_CHECKING:
    from tests.unit.extract.conftest import MakeConfig, MakeEngine, SomeRows, WriteRows


class Counting(FakeEngine):
    """Counts the requests."""

    given = 0

    def make_request(self, *args: Any, **options: Any) -> FakeRequest:
        self.given += 1
        return super().make_request(*args, **options)


@pytest.mark.parametrize("changes", [{}, {"generate": 4}, {"shard": (1, 3)}, {"overlong": "skip", "max_seq_len": 30}])
def test_it_yields_what_the_files_have(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, some_rows: SomeRows, changes: dict[str, Any]
) -> None:
    write_rows([{**row, "loss_mask": [1] * len(row["input_ids"])} for row in some_rows(20)])
    folder = Path(config().output_dir)
    extract(config(**changes), make_engine())
    found = {sample.index: sample for sample in stream(config(output_dir="", **changes), make_engine())}
    form = get_format("safetensors")
    assert len(found) == len(list(folder.glob("hs_*"))) > 5
    for index, sample in found.items():
        written = form.decode(folder / form.file(index, None), index)
        assert np.array_equal(sample.hidden_states, written.hidden_states)
        for name in ("id", "token_ids", "loss_mask", "layer_ids"):
            assert getattr(sample, name) == getattr(written, name)
        assert sample.file_metadata() == dict(written.metadata)


def test_nothing_is_computed_before_it_is_asked_for(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, some_rows: SomeRows
) -> None:
    write_rows(some_rows(50))
    engine = make_engine(Counting, max_num_seqs=2)
    assert isinstance(engine, Counting)
    samples = stream(config(batch_size=2), engine)
    assert engine.given == 0
    for taken in range(1, 20):
        next(samples)
        assert engine.given <= taken + 3 * 2
    samples.close()
    assert not engine.has_unfinished, "what was under way is aborted"
    assert not engine.closed, "it is the caller's"
    assert not Path(config().output_dir).exists()


def test_it_opens_and_closes_an_engine_of_its_own(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows([{"input_ids": [1, 2]}, {"input_ids": [3]}])
    engine = make_engine()
    monkeypatch.setattr(vllm_compat.engine, "open_engine", lambda _, **options: engine)
    samples = stream(config(output_dir=""))
    assert next(samples).token_ids in ((1, 2), (3,))
    assert not engine.closed
    samples.close()
    assert engine.closed


def test_states_that_are_not_finite(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, caplog: pytest.LogCaptureFixture
) -> None:
    write_rows([{"input_ids": [1, 2]}, {"input_ids": [3]}])

    def spoiled(rows: Any) -> Any:
        found = np.array(rows, dtype=np.float32)
        return found * np.nan if len(found) == 1 else found

    with pytest.raises(NonFiniteError, match="sample 1 "):
        list(stream(config(output_dir=""), make_engine(make_tensor=spoiled)))
    (only,) = stream(config(output_dir="", on_nonfinite="skip"), make_engine(make_tensor=spoiled))
    assert only.index == 0
    assert "left out: sample 1 " in caplog.text


def test_files_need_a_folder(config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows) -> None:
    write_rows([{"input_ids": [1, 2]}])
    with pytest.raises(UsageError, match="no output_dir is given; stream"):
        extract(config(output_dir=""), make_engine())
