"""A bar where somebody looks, else a line now and then."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
import time

import pytest

from vllm_compat.extract import progress
from vllm_compat.extract.spent import Spent


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    bar = progress.show(2)
    bar.advance(100, 5_000_000)
    bar.advance(50, 5_000_000)
    bar.close()
    text = terminal.getvalue()
    assert "2/2" in text
    assert "tok/s" in text
    assert "MB/s" in text


def test_lines_elsewhere_at_most_every_30_s(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    caplog.set_level(logging.INFO, "vllm_compat")
    lines = progress.show(10)
    for second in (10, 29, 31, 32, 60, 62):
        now[0] = second
        lines.advance(310, 31_000_000)
    lines.close()
    assert caplog.messages == [
        "3 of 10 samples, 30 tok/s, 3.0 MB/s",
        "6 of 10 samples, 30 tok/s, 3.0 MB/s",
    ]


@pytest.mark.parametrize(
    ("spent", "told"),
    [
        (Spent(steps=60.0, states=0.5, writers=33.0), "0.1 MB/s, 33% waiting for writers"),
        (Spent(steps=60.0, states=2.0, writers=33.0), "0.1 MB/s, 2% waiting for states, 33% waiting for writers"),
        (None, "0.1 MB/s"),
    ],
)
def test_waiting_is_told_by_its_cause(monkeypatch: pytest.MonkeyPatch, spent: Spent | None, told: str) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    bar = progress.show(1)
    now[0] = 100.0
    bar.advance(1000, 10_000_000, spent)
    bar.close()
    assert f"10 tok/s, {told}]" in terminal.getvalue()


def test_without_tqdm_there_are_lines(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vllm_compat")
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setitem(sys.modules, "tqdm", None)
    progress.show(1).close()
    assert "tqdm is not installed" in caplog.text


def test_tqdm_is_imported_only_for_a_bar() -> None:
    code = (
        "import sys\nfrom vllm_compat.extract.progress import show\nshow(3).advance(1, 1)\nprint('tqdm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
