"""Run an extraction, kill it at a random moment, go on, and so on; after every kill look at what there is.

python kills.py MODEL DATA FOLDER KILLS

Prints how many kills there were, how many runs came to their end, and how many lines their journals have.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.unit.extract.tree import tree_of

from vllm_compat.extract import ExtractConfig, extract
from vllm_compat.extract.checksum import xxh3
from vllm_compat.extract.journal import Entry, entry_at, read_journal
from vllm_compat.testing import FakeEngine
from vllm_compat.types import StepResult

LONGEST_S = 0.12  # about what a run takes; a kill comes at any moment of it


class SlowEngine(FakeEngine):
    """Leaves some time between the samples."""

    def run_step(self, meanwhile: Callable[[], None] | None = None) -> StepResult:
        time.sleep(0.001)
        return super().run_step(meanwhile)


def read(journal: Path) -> list[Entry]:
    """The entries of a journal."""
    with journal.open("rb") as file:
        return [entry_at(file, offset) for offset, _ in read_journal(journal, 40)]


def run(config: ExtractConfig) -> None:
    """One start of the program."""
    extract(config, SlowEngine((2, 5), num_layers=8, max_num_seqs=2, make_tensor=np.array))


def start(config: ExtractConfig) -> int:
    """The program in a process of its own, which exits with 0 at the end."""
    process = os.fork()
    if process:
        return process
    try:
        run(config)
        os._exit(0)
    finally:
        os._exit(1)


def main(model: str, data: str, folder: str, wanted_kills: int) -> None:
    """Kill and go on."""
    logging.disable()
    rng = random.Random(0)
    clean = ExtractConfig(model, data, Path(folder, "clean"), (2, 5), batch_size=2)
    run(clean)
    wanted = tree_of(Path(folder, "clean"))
    kills = runs = commits = 0
    while kills < wanted_kills:
        config = ExtractConfig(model, data, Path(folder, f"run-{runs}"), (2, 5), batch_size=2)
        journal = Path(config.output_dir, "journal-0-of-1.jsonl")
        before: list[Entry] = []
        while kills < wanted_kills:
            process = start(config)
            time.sleep(rng.uniform(0, LONGEST_S))
            os.kill(process, signal.SIGKILL)
            _, status = os.waitpid(process, 0)
            if os.WIFEXITED(status):
                assert os.WEXITSTATUS(status) == 0, "it failed"
                break
            kills += 1
            entries = read(journal) if journal.exists() else []
            assert entries[: len(before)] == before, "what was done is done no more"
            before = entries
            for entry in entries:
                assert xxh3([Path(config.output_dir, entry.file).read_bytes()]) == entry.xxh3, entry
        run(config)
        assert tree_of(Path(config.output_dir)) == wanted
        runs += 1
        commits += len(list(read_journal(journal, 40)))
    print(kills, runs, commits)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
