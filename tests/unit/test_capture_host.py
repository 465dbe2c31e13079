"""The copy beside the device's work: who waits for whom, and how much memory it takes."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.slow_device import STALE, SlowDevice

from vllm_compat._capture.host import InPlace, SideStream, host_copy, planes

torch: Any = pytest.importorskip("torch")


def rows(count: int, value: float) -> Any:
    return torch.full((count, 2, 3), value)


def test_on_the_cpu_nothing_is_copied_and_rows_are_taken_at_once() -> None:
    copy = host_copy(torch.device("cpu"))
    tensors = [rows(3, 1), rows(3, 2)]
    copy.before_write()
    copy.send(tensors, [(0, len(tensors[0]))])
    assert isinstance(copy, InPlace)
    assert not copy.late
    assert copy.finish() is tensors


def test_a_copy_waits_for_the_layers_and_the_host_for_the_copy() -> None:
    device = SlowDevice()
    copy = SideStream(device)  # type: ignore[arg-type]
    assert copy.late
    copy.before_write()
    copy.send([torch.tensor([1, 2]), rows(2, 1)], [(0, 2)])
    assert device.log == ["model waits for nothing"]  # the sampled tokens of this pass go first
    ids, states = copy.finish()
    assert device.log[1:] == [
        "side waits for what model has done",
        "side copies [2]",
        "side copies [2, 3]",
        "side copies [2, 3]",
        "host waits for what side has done",
    ]
    assert ids.tolist() == [1, 2]
    assert torch.equal(states, rows(2, 1))


def test_a_copy_begins_in_the_next_pass_and_its_layers_wait_before_they_write_again() -> None:
    device, buffer = SlowDevice(), rows(4, 1)
    copy = SideStream(device)  # type: ignore[arg-type]
    copy.send([buffer], [(0, 4)])
    copy.before_write()
    assert device.log == [
        "side waits for what model has done",
        "side copies [4, 3]",
        "side copies [4, 3]",
        "model waits for what side has done",
    ]
    buffer.fill_(2)
    assert torch.equal(copy.finish()[0], rows(4, 1))


def test_a_copy_waits_for_what_was_queued_when_it_was_sent_and_for_nothing_of_the_next_pass() -> None:
    device, buffer = SlowDevice(), rows(4, 1)
    copy = SideStream(device)  # type: ignore[arg-type]
    copy.send([buffer], [(0, 4)])
    sent = copy._written.of
    device.model_stream.add(lambda: None)  # layers before the one that writes
    copy.before_write()
    assert copy._written.of == sent
    assert torch.equal(copy.finish()[0], rows(4, 1))


def test_pinned_memory_is_that_of_the_largest_pass() -> None:
    device = SlowDevice()
    copy = SideStream(device)  # type: ignore[arg-type]
    for count in (2, 5, 3, 5, 1):
        copy.send([rows(count, count)], [(0, count)])
        assert torch.equal(copy.finish()[0], rows(count, count))
    assert device.pinned_rows == [2, 5]
    assert len(copy._pinned) == 1


def test_tensors_of_several_kinds_have_pinned_memory_each() -> None:
    copy = SideStream(SlowDevice())  # type: ignore[arg-type]
    for _ in range(2):
        tensors = [rows(2, 1), rows(2, 2), rows(2, 3).double(), torch.arange(2)]
        copy.send(tensors, [(0, 2)])
        for found, wanted in zip(copy.finish(), tensors, strict=True):
            assert found.dtype == wanted.dtype
            assert torch.equal(found, wanted)
    assert len(copy._pinned) == 4


def test_of_a_pass_only_the_rows_asked_for_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_compat._capture.host._SHORT_BYTES", 16)  # two rows of one int64, one of three floats
    device, states = SlowDevice(), planes(10, 2, 3)
    states.copy_(torch.arange(60).view(10, 2, 3))
    copy = SideStream(device)  # type: ignore[arg-type]
    copy.send([torch.arange(10), states], [(1, 3), (6, 7), (9, 10)])
    ids, found = copy.finish()
    assert [line for line in device.log if "copies" in line] == [
        *("side copies [2]", "side copies [4]"),
        *["side copies [2, 3]"] * 2, *["side copies [1, 3]"] * 4,
    ]  # fmt: skip
    assert ids.tolist() == [STALE, 1, 2, STALE, STALE, STALE, 6, 7, 8, 9]
    copied = [1, 2, 6, 9]
    assert torch.equal(found[copied], states[copied])
    assert found[[0, 3, 4, 5, 7, 8]].unique().tolist() == [STALE]


def test_rows_of_every_other_request_are_copied_at_once_where_they_are_few() -> None:
    device = SlowDevice()
    copy = SideStream(device)  # type: ignore[arg-type]
    copy.send([torch.arange(256), torch.zeros(256, 4, 4096)], [(n, n + 1) for n in range(0, 256, 2)])
    copy.finish()
    assert [line for line in device.log if "copies" in line] == ["side copies [255]", *["side copies [255, 4096]"] * 4]


def test_planes_are_contiguous_each_by_itself() -> None:
    found = planes(5, 3, 4, dtype=torch.bfloat16)
    assert found.shape == (5, 3, 4)
    assert all(plane.is_contiguous() for plane in found.unbind(1))
    assert planes(5, dtype=torch.int32).shape == (5,)
