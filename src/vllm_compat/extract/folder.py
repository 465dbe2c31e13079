"""A run's folder, from the start of this process in it to the seal."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Generator
from itertools import islice
from pathlib import Path

from vllm_compat.errors import CaptureError, UsageError
from vllm_compat.extract.config import ExtractConfig
from vllm_compat.extract.done import Done, SealedEntries, read_done
from vllm_compat.extract.files import sync_file
from vllm_compat.extract.identity import check_same_run
from vllm_compat.extract.inputs import Sample, read_samples
from vllm_compat.extract.journal import Journal, find_journals
from vllm_compat.extract.locks import is_locked, locked_folder
from vllm_compat.extract.plan import Plan
from vllm_compat.extract.record import Effort, Record, Summary, read_record, versions, write_record
from vllm_compat.extract.store import Store
from vllm_compat.extract.sweep import find_strangers, sweep
from vllm_compat.formats import SealedRun

__all__ = ["RunFolder", "open_run"]

logger = logging.getLogger(__name__)


class RunFolder:
    """A run's folder with a shard of it locked.

    Attributes:
        done: what is done, by whatever process; this one's commits are added.
        store: where this process commits.
    """

    def __init__(self, plan: Plan, config: ExtractConfig, done: Done, store: Store) -> None:
        self.done = done
        self.store = store
        self._plan = plan
        self._shard = config.shard
        self._kept = len(done)

    @property
    def num_owed(self) -> int:
        """How many samples of the shard are still to be done."""
        return self.done.owed(self._shard)

    def owed_samples(self) -> Generator[Sample, None, None]:
        """The samples of the shard that are still to be done; the lines of others are not parsed.

        Raises:
            InputChangedError: the input is not the one that was checked.
        """
        mine, count = self._shard
        return read_samples(self._plan.input, lambda index: index % count == mine and self.done.owes(index))

    def seal(self, effort: Effort, num_layers: int | None) -> Summary:
        """Prove that all is done, write the sidecars, and say so in ``run.json``; or leave that to the last shard.

        Args:
            effort: what this process did.
            num_layers: decoder layers of the model; None when not known.

        Raises:
            CaptureError: samples of this shard are gone, or there are files that are nobody's.
            JournalError: a journal that was changed.
            StorageError: a sidecar cannot be written.
        """
        plan = self._plan
        folder, total = plan.output_dir, plan.input.num_samples
        with locked_folder(folder):
            record = read_record(folder) or plan.record
            if record.complete and self.done.complete:
                return self._summary(effort, self.done)
            entries = SealedEntries(folder, total)
            done = entries.done
            if done.owed(self._shard):
                missing = ", ".join(map(str, done.first_owed()))
                raise CaptureError(f"{folder}: samples were written and are gone: {missing}; the same command fills in")
            summary = self._summary(effort, done)
            if done.complete and not record.complete:
                _refuse_strangers(plan, done)
                for path, _ in find_journals(folder):
                    sync_file(path)  # another shard may have been killed between its last line and the sync
                plan.format.seal(folder, self._sealed(entries, num_layers))
                write_record(folder, _completed(record, summary, done))
        return summary

    def _summary(self, effort: Effort, done: Done) -> Summary:
        return Summary(
            samples=len(done),
            tokens=done.tokens,
            bytes=done.bytes,
            seconds=effort.seconds,
            truncated=self._plan.input.num_truncated,
            tokens_per_second=effort.tokens / max(effort.seconds, 1e-9),
            output_dir=str(self._plan.output_dir),
            complete=done.complete,
            kept=self._kept,
            skipped=done.num_skipped,
            stalled=effort.stalled,
        )

    def _sealed(self, entries: SealedEntries, num_layers: int | None) -> SealedRun:
        plan = self._plan
        return SealedRun(
            entries=entries,
            rows=lambda: read_samples(plan.input),
            num_samples=plan.input.num_samples,
            layer_ids=plan.layer_ids,
            num_layers=num_layers,
            model=str(plan.record.identity["model"]),
            config=plan.record.about["config"],
        )


@contextlib.contextmanager
def open_run(plan: Plan, config: ExtractConfig) -> Generator[RunFolder, None, None]:
    """Begin a run in its folder, or go on with the one that is there.

    Raises:
        RunMismatchError: the folder's run is another.
        UsageError: the shard is another process's, the shards are divided otherwise, or there are foreign samples.
        JournalError: a journal that was changed.
        StorageError: the file system refused.
    """
    folder, total = plan.output_dir, plan.input.num_samples
    with contextlib.ExitStack() as stack:
        with locked_folder(folder):
            before = _agreed_record(plan)
            journal = Journal(folder, config.shard)
            stack.callback(journal.close)
            _refuse_other_divisions(folder, config.shard)
            sweep(folder, config.shard)
        done, ends = read_done(folder, total)
        journal.recover(ends[journal.path])
        if before.complete and not done.complete:
            logger.warning("%d files of a complete run are gone; they are made again", total - len(done))
            with locked_folder(folder):
                write_record(folder, _reopened(before))
        yield RunFolder(plan, config, done, Store(folder, plan.format, journal, config.shard, done))


def _agreed_record(plan: Plan) -> Record:
    """The folder's record, written if this process is the first."""
    folder = plan.output_dir
    before = read_record(folder)
    if before:
        check_same_run(folder, before.identity, plan.record.identity)
        now = versions()["vllm_version"]
        if before.about.get("vllm_version") != now:
            logger.warning(
                "the run was begun with vLLM %s, and %s is installed; each file says which it is from",
                before.about.get("vllm_version"),
                now,
            )
        if before.input != plan.record.input:  # the same lines in another place, or touched: found by reading them
            before = dataclasses.replace(before, input=plan.record.input)
            write_record(folder, before)
        return before
    old = next(find_strangers(folder, plan.format), None) or next(
        (path.name for path, _ in find_journals(folder)), None
    )
    if old:
        raise UsageError(
            f"{folder} already has samples of an earlier run ({old}) and no record of it, which must not be mixed with "
            "new ones. Give another output folder, or move them away"
        )
    write_record(folder, plan.record)
    return plan.record


def _refuse_other_divisions(folder: Path, shard: tuple[int, int]) -> None:
    """Two ways to divide the samples, both at work, would do samples twice."""
    for path, (_, count) in find_journals(folder):
        if count != shard[1] and is_locked(path):
            raise UsageError(
                f"a process with --shard I/{count} is at work in {folder}; this one has {shard[0]}/{shard[1]}. Wait "
                "for it, or divide in the same way"
            )


def _refuse_strangers(plan: Plan, done: Done) -> None:
    found = list(islice(find_strangers(plan.output_dir, plan.format, done, plan.input.num_samples), 10))
    if found:
        raise CaptureError(
            f"{plan.output_dir} has files that are named like samples and are none of this run: {', '.join(found)}. "
            "Move them away; the same command then ends the run"
        )


def _reopened(before: Record) -> Record:
    about = {name: value for name, value in before.about.items() if name not in ("summary", "skipped")}
    return dataclasses.replace(before, complete=False, about=about)


def _completed(before: Record, summary: Summary, done: Done) -> Record:
    about = {**before.about, "summary": dataclasses.asdict(summary)}
    if done.num_skipped:
        about["skipped"] = [{"index": index, "why": why} for index, why in sorted(done.skipped.items())]
    return dataclasses.replace(before, complete=True, about=about)
