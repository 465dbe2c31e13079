"""A run's folder, from the start of this process in it to the seal."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from array import array
from collections.abc import Generator, Iterable, Iterator
from itertools import islice
from pathlib import Path

from vllm_compat.errors import CaptureError, UsageError
from vllm_compat.extract.config import ExtractConfig
from vllm_compat.extract.done import Done, SealedEntries, read_done
from vllm_compat.extract.files import sync_file
from vllm_compat.extract.identity import check_same_run
from vllm_compat.extract.inputs import Originals, Sample, read_samples
from vllm_compat.extract.journal import Entry, Journal, find_journals, has_begun
from vllm_compat.extract.locks import ShardBusyError, is_locked, locked_folder
from vllm_compat.extract.merging import keep_duplicates, may_merge
from vllm_compat.extract.plan import Plan
from vllm_compat.extract.record import Effort, Record, Summary, read_record, sealed, unsealed, versions, write_record
from vllm_compat.extract.sidecars import write_sidecars
from vllm_compat.extract.store import Store
from vllm_compat.extract.sweep import find_strangers, sweep
from vllm_compat.formats import FORMATS, Row, SealedRun, get_format

__all__ = ["RunFolder", "begin_run", "open_run"]

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
        self._generate = bool(config.generate)
        self._kept = len(done)
        found = plan.input.duplicates
        self._originals = found.originals(config.shard) if found and may_merge(config) else Originals()

    @property
    def num_owed(self) -> int:
        """How many samples of the shard are still to be done."""
        return self.done.owed(self._shard)

    @property
    def num_owed_duplicates(self) -> int:
        """How many of them have the tokens of an earlier sample of the shard."""
        return sum(self.done.owes(index) for index, _, _ in self._originals)

    def originals_of_owed(self) -> array[int]:
        """The samples that have the tokens of these, rising."""
        return array("Q", sorted({original for index, original, _ in self._originals if self.done.owes(index)}))

    def owed_duplicates(self) -> Generator[tuple[Sample, int], None, None]:
        """These, each with the number of the sample that has its tokens; the lines of others are not parsed.

        Raises:
            InputChangedError: the input is not the one that was checked.
        """
        originals = self._originals
        found = read_samples(self._plan.input, lambda index: index in originals and self.done.owes(index))
        with contextlib.closing(found):
            for sample in found:
                original = originals.of(sample.index)
                assert original is not None
                yield sample, original

    def owed_samples(self) -> Generator[Sample, None, None]:
        """The samples of the shard that are still to be computed; the lines of others are not parsed.

        Those that are to be left out for their length are, on the way.

        Raises:
            InputChangedError: the input is not the one that was checked.
        """
        mine, count = self._shard

        def wanted(index: int) -> bool:
            return index % count == mine and self.done.owes(index) and index not in self._originals

        found = read_samples(self._plan.input, wanted)
        with contextlib.closing(found):
            for sample in found:
                if not sample.overlong:
                    yield sample
                    continue
                why = f"{sample.overlong} tokens, and the limit is {self._plan.input.max_tokens}"
                self.store.skip(Entry(sample.index, "", 0, "", sample.overlong, None, sample.id, skipped=why))

    def needs_engine(self) -> bool:
        """Whether a sample is still to be computed. Those before it that are too long are left out on the way.

        Raises:
            InputChangedError: the input is not the one that was checked.
        """
        any_owed = self.num_owed > self.num_owed_duplicates
        if not any_owed or not self._plan.input.num_left_out:
            return any_owed
        with contextlib.closing(self.owed_samples()) as samples:
            return next(samples, None) is not None

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
            num_layers = record.num_layers if num_layers is None else num_layers
            if record.complete and self.done.complete:
                return self._summary(effort, self.done)
            entries = SealedEntries(folder, total)
            done = entries.done
            if done.owed(self._shard):
                missing = ", ".join(map(str, done.first_owed()))
                raise CaptureError(f"{folder}: samples were written and are gone: {missing}; the same command fills in")
            summary = self._summary(effort, done)
            if done.complete and not record.complete:
                _refuse_strangers(plan, entries)
                for path in entries.journals:
                    sync_file(path)  # another shard may have been killed between its last line and the sync
                sidecars = write_sidecars(folder, plan.format, self._sealed(entries, num_layers))
                write_record(folder, sealed(record, summary, done, sidecars, num_layers))
        return summary

    def _summary(self, effort: Effort, done: Done) -> Summary:
        return Summary(
            samples=len(done),
            tokens=done.tokens,
            bytes=done.bytes,
            seconds=effort.seconds,
            truncated=self._plan.input.num_truncated,
            overlong=self._plan.input.num_left_out,
            copied=effort.copied,
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
            rows=lambda: self._answered(entries) if self._generate else read_samples(plan.input),
            num_samples=plan.input.num_samples,
            layer_ids=plan.layer_ids,
            num_layers=num_layers,
            model=str(plan.record.identity["model"]),
            config=plan.record.about["config"],
        )

    def _answered(self, entries: SealedEntries) -> Iterator[Row]:
        """Prompts and answers, which the files alone have; of a skipped sample the prompt."""
        plan = self._plan
        have = bytearray(plan.input.num_samples)
        for entry in entries:
            have[entry.index] = bool(entry.file)
        prompts = read_samples(plan.input, lambda index: not have[index])
        for entry in entries:
            yield plan.format.row(plan.output_dir / entry.file) if entry.file else next(prompts)


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
            journals = find_journals(folder)  # once: a folder of a million names is read for it
            _refuse_other_divisions(folder, journals, config.shard)
            keep_duplicates(folder, plan.input)
            sweep(folder, config.shard)
        done, ends = read_done(folder, total, [path for path, _ in journals])
        journal.recover(ends[journal.path])
        if before.complete and not done.complete:
            logger.warning("%d files of a complete run are gone; they are made again", total - len(done))
            with locked_folder(folder):
                write_record(folder, unsealed(before))
        yield RunFolder(plan, config, done, Store(folder, plan.format, journal, config.shard, done))


def begin_run(plan: Plan, count: int) -> Done:
    """Begin a run, or go on with the one that is there, for other processes that will do its ``count`` shards.

    Returns:
        What is done.

    Raises:
        RunMismatchError: the folder's run is another.
        UsageError: the shards are divided otherwise by processes that are at work, or there are foreign samples.
        JournalError: a journal that was changed.
        StorageError: the file system refused.
    """
    folder = plan.output_dir
    with locked_folder(folder):
        _agreed_record(plan)
        journals = find_journals(folder)
        _refuse_other_divisions(folder, journals, (0, count))
        keep_duplicates(folder, plan.input)
    done, _ = read_done(folder, plan.input.num_samples, [path for path, _ in journals])
    return done


def _agreed_record(plan: Plan) -> Record:
    """The folder's record, written if this process is the first, or all before it came to nothing."""
    folder = plan.output_dir
    before = read_record(folder)
    if before and (before.identity == plan.record.identity or has_begun(folder)):
        check_same_run(folder, before.identity, plan.record.identity)
        now = versions()["vllm_version"]
        if before.about.get("vllm_version") != now:
            logger.warning(
                "the run was begun with vLLM %s, and %s is installed; each file says which it is from",
                before.about.get("vllm_version"),
                now,
            )
        num_layers = plan.num_layers if before.num_layers is None else before.num_layers
        # The input may be the same lines in another place, or touched: found by reading them.
        record = dataclasses.replace(before, input=plan.record.input, num_layers=num_layers)
        if record != before:
            write_record(folder, record)
        return record
    begun = has_begun(folder)
    left = (name for form in FORMATS for name in find_strangers(folder, get_format(form)))
    old = next(left, None) or (begun and next((path.name for path, _ in find_journals(folder)), None))
    if old:
        raise UsageError(
            f"{folder} already has samples of an earlier run ({old}) and no record of it, which must not be mixed with "
            "new ones. Give another output folder, or move them away"
        )
    record = dataclasses.replace(plan.record, num_layers=plan.num_layers)
    write_record(folder, record)
    return record


def _refuse_other_divisions(
    folder: Path, journals: Iterable[tuple[Path, tuple[int, int]]], shard: tuple[int, int]
) -> None:
    """Two ways to divide the samples, both at work, would do samples twice."""
    for path, (_, count) in journals:
        if count != shard[1] and is_locked(path):
            raise ShardBusyError(
                f"a process with --shard I/{count} is at work in {folder}; this one has {shard[0]}/{shard[1]}. Wait "
                "for it, or divide in the same way"
            )


def _refuse_strangers(plan: Plan, entries: SealedEntries) -> None:
    found = list(islice(find_strangers(plan.output_dir, plan.format, entries), 10))
    if found:
        raise CaptureError(
            f"{plan.output_dir} has files that are named like samples and are none of this run: {', '.join(found)}. "
            "Move them away; the same command then ends the run"
        )
