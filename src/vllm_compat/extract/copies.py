"""Samples whose tokens another one has: made from that one's durable file, without the model."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_compat.errors import CaptureError, StoppedError
from vllm_compat.extract.checksum import xxh3_of_file
from vllm_compat.extract.config import ExtractConfig
from vllm_compat.extract.files import storage
from vllm_compat.extract.folder import RunFolder
from vllm_compat.extract.inputs import Sample
from vllm_compat.extract.journal import Entry, entry_at, find_journals, read_journal
from vllm_compat.extract.plan import Plan
from vllm_compat.extract.progress import ProgressFactory
from vllm_compat.extract.record import Effort
from vllm_compat.extract.report import ended, log_end
from vllm_compat.extract.stop import Stop
from vllm_compat.extract.writers import Writers
from vllm_compat.formats import SampleData, SampleFileError
from vllm_compat.types import Tensor

__all__ = ["copy_duplicates"]

_OF_THE_FILE = frozenset({"index", "sample_id", "layer_ids", "layer_id_convention", "quantized", "loss_mask_absent"})
"""Metadata that a format makes itself, and that need not be the same in a copy."""

logger = logging.getLogger(__name__)


def copy_duplicates(
    plan: Plan, config: ExtractConfig, run: RunFolder, progress: ProgressFactory | None, stop: Stop
) -> Effort:
    """Make what is owed of samples whose tokens an earlier one of the shard has; that one is done.

    Raises:
        CaptureError: a file that is not what was written, or not of those tokens.
        JournalError: a journal that was changed.
        StorageError: the file system refused.
        StoppedError: ``stop`` asked for it.
    """
    start, tokens, count = time.monotonic(), 0, 0
    copier = _Copier(plan, run, bool(config.generate))
    writers = Writers(copier.write, threads=config.writers, max_pending_bytes=config.max_pending_bytes)
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(contextlib.closing(progress(run.num_owed))) if progress else None

        def tell() -> None:
            nonlocal tokens, count
            for entry in writers.written():
                tokens, count = tokens + entry.tokens, count + 1
                if bar:
                    bar.advance(entry.tokens, entry.bytes)

        samples = stack.enter_context(contextlib.closing(run.owed_duplicates()))
        stack.enter_context(stop.heeding())
        try:
            for sample, original in stop.until(samples):
                writers.submit(sample, _Original(original))
                tell()
            writers.close()
            tell()
        except BaseException as error:
            run.store.refuse()
            with contextlib.suppress(Exception):
                writers.close()
            log_end(plan, run.done, error)
            raise
    if stop.reason:
        raise StoppedError(ended(plan, run.done, stop.reason), reason=stop.reason)
    seconds = time.monotonic() - start
    logger.info("%d samples were made from files with the same tokens, without the model: %.1f s", count, seconds)
    return Effort(tokens, seconds, writers.stalled, copied=count)


@dataclass(frozen=True, slots=True)
class _Original:
    """Which sample has the states; none of them is held while it waits."""

    index: int
    hidden_states: Sequence[Tensor] = ()


class _Copier:
    """Makes copies. Threads may share it."""

    def __init__(self, plan: Plan, run: RunFolder, generate: bool) -> None:
        self._plan = plan
        self._store = run.store
        self._generate = generate
        self._lines = _Lines(plan.output_dir, plan.input.num_samples, run.originals_of_owed())

    def write(self, sample: Sample, original: _Original) -> Entry | None:
        """Commit a copy. After the first error nothing more is committed: None is returned."""
        try:
            return self._write(sample, self._lines.entry(original.index))
        except BaseException:
            self._store.refuse()
            raise

    def _write(self, sample: Sample, entry: Entry) -> Entry | None:
        if entry.skipped:
            return self._store.skip(dataclasses.replace(entry, index=sample.index, id=sample.id, again=0))
        path = self._plan.output_dir / entry.file
        with storage(path, "read"):
            digest = xxh3_of_file(path)
        if digest != entry.xxh3:
            raise SampleFileError(
                f"sample {entry.index}: {path} is not what was written, and sample {sample.index} has the same tokens: "
                f"its xxh3 is {digest}, {entry.xxh3} was written. Remove the file, and the same command makes it again"
            )
        found = self._plan.format.decode(path, entry.index)
        prompt = found.token_ids[: len(sample.token_ids)] if self._generate else found.token_ids
        if (prompt, found.layer_ids) != (sample.token_ids, self._plan.layer_ids):
            raise CaptureError(
                f"sample {sample.index} (line {sample.line}) is said to have the tokens of sample {entry.index}, and "
                f"{path} has others. Nothing of this run is trustworthy"
            )
        copy = SampleData(
            index=sample.index,
            id=sample.id,
            token_ids=found.token_ids,
            loss_mask=found.loss_mask if self._generate else sample.loss_mask,
            layer_ids=found.layer_ids,
            hidden_states=found.hidden_states,
            metadata={name: text for name, text in found.metadata.items() if name not in _OF_THE_FILE},
        )
        return self._store.commit(copy, entry.sampled, states_of=path)


class _Lines:
    """The journal's lines of a few samples, in 16 bytes each and read when they are asked for."""

    def __init__(self, folder: Path, num_samples: int, wanted: array[int]) -> None:
        self._wanted = wanted  # rising
        self._paths = [path for path, _ in find_journals(folder)]
        self._places = array("q", [-1]) * len(wanted)
        again: dict[int, int] = {}
        for number, path in enumerate(self._paths):
            for offset, entry in read_journal(path, num_samples):
                at = bisect_left(wanted, entry.index)
                if at < len(wanted) and wanted[at] == entry.index and entry.again >= again.get(entry.index, 0):
                    self._places[at] = offset * len(self._paths) + number
                    if entry.again:
                        again[entry.index] = entry.again

    def entry(self, index: int) -> Entry:
        """The line that counts for a sample.

        Raises:
            CaptureError: there is none.
        """
        place = self._places[bisect_left(self._wanted, index)]
        if place < 0:
            raise CaptureError(f"sample {index} is done, and no journal has its line any more")
        offset, number = divmod(place, len(self._paths))
        with storage(self._paths[number], "read"), self._paths[number].open("rb") as file:
            return entry_at(file, offset)
