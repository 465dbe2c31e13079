"""All of a run, read at the speed of the disk, with as much memory for a thousand samples as for a million."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Container, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from vllm_compat.extract.inputs import Sample
from vllm_compat.extract.journal import Entry
from vllm_compat.extract.names import Names
from vllm_compat.extract.progress import Progress
from vllm_compat.verify.lines import Lines
from vllm_compat.verify.problems import Problem, Problems
from vllm_compat.verify.record import check_record, check_sidecars
from vllm_compat.verify.rows import InputRows
from vllm_compat.verify.run import RunFacts
from vllm_compat.verify.sample import Checked, Expected, check_sample
from vllm_compat.verify.strangers import find_strangers

__all__ = ["Scan", "scan"]

_AHEAD = 4  # samples under way, for each thread


@dataclass(frozen=True, slots=True)
class Scan:
    """What a scan saw.

    Attributes:
        done: samples that the journals say are done, skipped ones too.
        read: samples whose files were read.
        good: of these, those with which nothing is wrong.
        skipped: samples without a file, because their states were not finite or their tokens too many.
        tokens: of the samples that were read.
        bytes: size of their files.
        seconds: that it took.
        torn: journals that end in half a line.
        unfinished: files that a run under way has not ended, or a dead process left.
    """

    done: int
    read: int
    good: int
    skipped: int
    tokens: int
    bytes: int
    seconds: float
    torn: tuple[str, ...]
    unfinished: int


def scan(
    run: RunFacts,
    lines: Lines,
    rows: InputRows,
    problems: Problems,
    *,
    jobs: int,
    only: Container[int] | None = None,
    ends: tuple[int, ...] = (),
    seen: Callable[[Checked], None] = lambda _: None,
    progress: Progress | None = None,
) -> Scan:
    """Read every sample, and look for what is not of the run.

    Args:
        run: the run.
        lines: of its journals.
        rows: of its input.
        problems: gets what is wrong.
        jobs: threads that read.
        only: read the files of these samples alone, and leave the folder unsearched; None for everything.
        ends: positions of the layers whose last state of each sample is wanted.
        seen: told of each sample that was read, in order.
        progress: told of each sample that was read.

    Raises:
        InputChangedError: the input changes meanwhile.
        JournalError: a journal changes meanwhile.
        StorageError: the folder cannot be read.
    """
    start = time.monotonic()
    read = good = skipped = tokens = size = all_tokens = all_bytes = 0
    own = Names()

    def take(checked: Checked) -> None:
        nonlocal read, good, tokens, size
        read, size = read + 1, size + checked.size
        good += not checked.what
        tokens += checked.entry.tokens
        for what in checked.what:
            problems.add(Problem(what, checked.entry.index, checked.entry.file, checked.line))
        seen(checked)
        if progress:
            progress.advance(checked.entry.tokens, checked.size)

    with contextlib.closing(_Readers(run, jobs, ends)) as readers:
        for index, entry, row in _joined(lines, rows, only):
            if entry is None:
                if run.complete:
                    what = "it is missing: run.json says the run is complete, and no journal has a line of it"
                    problems.add(Problem(what, index, line=row.line if row else 0))
                continue
            if entry.skipped:
                skipped += 1
                continue
            own.add(entry.file)
            all_tokens, all_bytes = all_tokens + entry.tokens, all_bytes + entry.bytes
            if only is None or index in only:
                for checked in readers.submit(entry, row, compared=not rows.why_not):
                    take(checked)
        for checked in readers.rest():
            take(checked)
    own.end()
    unfinished = 0 if only is not None else find_strangers(run, lines, own, problems)
    check_sidecars(run, problems, all_of_them=only is None)
    counted = {"samples": lines.num_done, "skipped": skipped, "tokens": all_tokens, "bytes": all_bytes}
    check_record(run, counted, problems)
    return Scan(
        done=lines.num_done,
        read=read,
        good=good,
        skipped=skipped,
        tokens=tokens,
        bytes=size,
        seconds=time.monotonic() - start,
        torn=tuple(lines.torn),
        unfinished=unfinished,
    )


class _Readers:
    """Threads that read a few samples ahead; what they found comes back in order."""

    def __init__(self, run: RunFacts, jobs: int, ends: tuple[int, ...]) -> None:
        self._run = run
        self._ends = ends
        self._most = _AHEAD * jobs
        self._threads = ThreadPoolExecutor(jobs, thread_name_prefix="vllm-compat-verify")
        self._under_way: deque[Future[Checked]] = deque()
        self._hidden_size = run.facts.hidden_size

    def submit(self, entry: Entry, row: Sample | None, *, compared: bool) -> Iterator[Checked]:
        """Let one more sample be read; yields what was found of earlier ones while too many are under way."""
        expected = Expected(entry, row, compared, self._hidden_size, self._ends)
        self._under_way.append(self._threads.submit(check_sample, self._run, expected))
        if len(self._under_way) >= self._most:
            yield self._next()

    def rest(self) -> Iterator[Checked]:
        """What was found of those under way."""
        while self._under_way:
            yield self._next()

    def close(self) -> None:
        """Let no more be read."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _next(self) -> Checked:
        checked = self._under_way.popleft().result()
        self._hidden_size = self._hidden_size or checked.hidden_size
        return checked


def _joined(
    lines: Lines, rows: InputRows, only: Container[int] | None
) -> Iterator[tuple[int, Entry | None, Sample | None]]:
    """Every sample with its entry, and those that are wanted with their rows, where there are any."""
    found = rows.read(only)
    for index, entry in lines:
        yield index, entry, next(found, None) if only is None or index in only else None
