"""The folder of the result: a run like any other, so that it can be verified, converted and gone on with."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator
from pathlib import Path

from vllm_compat.convert.source import Source
from vllm_compat.errors import UsageError
from vllm_compat.extract.done import Done, SealedEntries, read_done
from vllm_compat.extract.files import make_folder
from vllm_compat.extract.identity import check_same_run
from vllm_compat.extract.journal import Journal
from vllm_compat.extract.locks import locked_folder
from vllm_compat.extract.record import Record, Summary, read_record, sealed, unsealed, write_record
from vllm_compat.extract.sidecars import write_sidecars
from vllm_compat.extract.store import Store
from vllm_compat.extract.sweep import find_strangers, sweep
from vllm_compat.formats import Format, SealedRun
from vllm_compat.types import LayerId

__all__ = ["Target", "open_target"]

_SHARD = (0, 1)


class Target:
    """The folder of the result, locked.

    Attributes:
        done: what is done of it.
        store: where samples are committed.
    """

    def __init__(self, folder: Path, form: Format, record: Record, done: Done, store: Store) -> None:
        self.done = done
        self.store = store
        self._folder = folder
        self._form = form
        self._record = record

    def seal(self, source: Source, layer_ids: tuple[LayerId, ...], num_layers: int | None, summary: Summary) -> None:
        """Write the sidecars, and what ``run.json`` says at the end: complete only when no sample is missing.

        Raises:
            SampleFileError: a file of the run that cannot be read.
            StorageError: the file system refused.
        """
        run = SealedRun(
            entries=SealedEntries(self._folder, source.num_samples),
            rows=source.rows,
            num_samples=source.num_samples,
            layer_ids=layer_ids,
            num_layers=num_layers,
            model=str(source.record.identity["model"]),
            config=self._record.about["config"],
        )
        sidecars = write_sidecars(self._folder, self._form, run)
        write_record(self._folder, sealed(self._record, summary, self.done, sidecars, num_layers))


@contextlib.contextmanager
def open_target(
    folder: Path, form: Format, source: Source, layer_ids: tuple[LayerId, ...]
) -> Generator[Target, None, None]:
    """Begin a conversion in a folder, or go on with the one that is there.

    Raises:
        RunMismatchError: the folder has another run.
        UsageError: it has samples of no run, or another process is at work in it.
        JournalError: its journal was changed.
        StorageError: the file system refused.
    """
    _refuse_shared(folder.resolve(), source.folder.resolve())
    make_folder(folder)
    record = _record(form, source, layer_ids)
    with contextlib.ExitStack() as stack:
        with locked_folder(folder):
            before = read_record(folder)
            if before:
                check_same_run(folder, before.identity, record.identity)
            elif old := next(find_strangers(folder, form), None):
                raise UsageError(f"{folder} already has samples of no run that is known ({old}). Give another folder")
            journal = Journal(folder, _SHARD)
            stack.callback(journal.close)
            sweep(folder, _SHARD)
            write_record(folder, record)
        done, ends = read_done(folder, source.num_samples)
        journal.recover(ends[journal.path])
        yield Target(folder, form, record, done, Store(folder, form, journal, _SHARD, done))


def _record(form: Format, source: Source, layer_ids: tuple[LayerId, ...]) -> Record:
    """The run's record with another format and layers, and where it came from."""
    before = unsealed(source.record)
    changed = {"format": form.name, "layer_ids": list(layer_ids)}
    origin = {"format": source.format.name, "layer_ids": list(source.layer_ids)}
    return dataclasses.replace(
        before,
        identity={**before.identity, **changed, "converted_from": origin},
        about={**before.about, "config": {**source.config, **changed}},
    )


def _refuse_shared(target: Path, source: Path) -> None:
    if target == source or source in target.parents or target in source.parents:
        raise UsageError(f"{target} and {source} must not be in one another: readers search whole trees for samples")
