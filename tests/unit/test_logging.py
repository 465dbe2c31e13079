"""The commands' log lines."""

from __future__ import annotations

import logging
import re

import pytest

from vllm_compat._logging import logging_to_stderr

OURS = logging.getLogger("vllm_compat")


def test_each_line_goes_to_stderr_once(capsys: pytest.CaptureFixture[str]) -> None:
    with logging_to_stderr():
        root = logging.StreamHandler()
        logging.getLogger().addHandler(root)
        try:
            logging.getLogger("vllm_compat.extract").info("half is done")
            logging.getLogger("vllm_compat.extract").debug("a detail")
        finally:
            logging.getLogger().removeHandler(root)
    printed = capsys.readouterr()
    assert re.fullmatch(r"\d\d:\d\d:\d\d INFO half is done\n", printed.err)
    assert printed.out == ""


def test_the_logger_is_left_as_it_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the command fails: a program that calls ``main`` has its own logging."""
    monkeypatch.setattr(OURS, "level", logging.ERROR)
    monkeypatch.setattr(OURS, "propagate", True)
    before = list(OURS.handlers), OURS.level, OURS.propagate

    @logging_to_stderr()
    def fail() -> None:
        assert (len(OURS.handlers), OURS.level, OURS.propagate) == (len(before[0]) + 1, logging.INFO, False)
        raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (list(OURS.handlers), OURS.level, OURS.propagate) == before
