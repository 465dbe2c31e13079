"""Samples that begin alike are brought together, and none is lost on the way."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_compat.errors import StoppedError, UsageError
from vllm_compat.extract import ExtractConfig, Sample, extract, prefixes
from vllm_compat.extract.prefixes import neighbours
from vllm_compat.extract.stop import Stop
from vllm_compat.testing import FakeEngine
from vllm_compat.types import StepResult

if TYPE_CHECKING:
    from tests.unit.extract.conftest import MakeConfig, MakeEngine, WriteRows


def sample(index: int, token_ids: tuple[int, ...]) -> Sample:
    return Sample(index, index + 1, None, token_ids, None, False)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=40), st.integers(1, 12))
def test_a_window_is_in_the_order_of_its_tokens(rows: list[list[int]], window: int) -> None:
    samples = [sample(n, tuple(ids)) for n, ids in enumerate(rows)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes, "_WINDOW", window)
        found = list(neighbours(iter(samples)))
    for start in range(0, len(samples), window):
        part = found[start : start + window]
        assert sorted(s.index for s in part) == [s.index for s in samples[start : start + window]]
        assert all(a.token_ids <= b.token_ids for a, b in itertools.pairwise(part))


def test_no_more_than_a_window_is_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "_WINDOW", 3)
    read: list[int] = []

    def samples() -> Iterator[Sample]:
        for index in range(100):
            read.append(index)
            yield sample(index, (index,))

    next(neighbours(samples()))
    assert read == [0, 1, 2]


def test_the_engine_is_asked_to_share_and_the_gain_is_said(
    config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows, caplog: pytest.LogCaptureFixture
) -> None:
    write_rows([{"input_ids": [5, 6, 7]}, {"input_ids": [5, 6]}, {"input_ids": [4]}])
    settings = config(share_prefixes=True)
    assert settings.open_engine_options(99)["enable_prefix_caching"] is True
    assert "enable_prefix_caching" not in config().open_engine_options(99)
    with caplog.at_level("INFO", "vllm_compat"):
        summary = extract(settings, make_engine())
    assert (summary.samples, summary.tokens) == (3, 6)
    assert any(m.startswith("6 of 6 tokens were forwarded") for m in caplog.messages), "the fake engine shares nothing"


def test_a_stop_is_heeded_within_a_window(config: MakeConfig, make_engine: MakeEngine, write_rows: WriteRows) -> None:
    """The samples that were read ahead are not run."""
    write_rows([{"input_ids": [n % 50 + 1] * 3} for n in range(40)])
    stop = Stop()

    class Stopping(FakeEngine):
        def run_step(self, meanwhile: Callable[[], None] | None = None) -> StepResult:
            stop.request("a test")
            return super().run_step(meanwhile)

    with pytest.raises(StoppedError):
        extract(config(share_prefixes=True), make_engine(Stopping), stop=stop)
    summary = extract(config(), make_engine())  # without sharing, as a run may go on
    assert summary.complete
    assert 0 < summary.kept <= 4


def test_sharing_is_an_option_of_ours() -> None:
    with pytest.raises(UsageError, match="'enable_prefix_caching' is set by share_prefixes"):
        ExtractConfig("m", "d", "o", engine_options={"enable_prefix_caching": True})
