"""Everything that can be refused, is refused here: before a model is loaded."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm_compat._layers import check_layer_ids
from vllm_compat.engine import Engine
from vllm_compat.errors import InputError, InputProblem, StorageError, UsageError
from vllm_compat.extract.config import ExtractConfig
from vllm_compat.extract.files import make_folder
from vllm_compat.extract.identity import check_same_run, identify
from vllm_compat.extract.inputs import CheckedInput, TokenizerSource, check_input
from vllm_compat.extract.journal import has_begun
from vllm_compat.extract.locks import locked_folder
from vllm_compat.extract.merging import may_merge, read_duplicates
from vllm_compat.extract.model import choose_layer_ids, read_model_facts
from vllm_compat.extract.record import Record, read_record, record_of
from vllm_compat.extract.revision import find_revision
from vllm_compat.formats import Format, get_format
from vllm_compat.types import LayerId

__all__ = ["Job", "Plan", "check_engine", "make_job", "make_plan"]

_OF_THE_NAME = frozenset({errno.ENOTDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG})


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be run, and nothing speaks against it.

    Attributes:
        layer_ids: what to capture.
        num_layers: decoder layers of the model; None where the model does not say.
        max_model_len: for the engine: the longest prompt and the token sampled after it.
        input: the checked input.
        revision: which weights the model's name stands for; None when not known.
    """

    layer_ids: tuple[LayerId, ...]
    num_layers: int | None
    max_model_len: int
    input: CheckedInput
    revision: str | None


@dataclass(frozen=True, slots=True)
class Plan(Job):
    """A job whose samples go to files.

    Attributes:
        format: how samples lie on disk.
        output_dir: an existing folder.
        record: what ``run.json`` says of this run while it is not complete.
    """

    format: Format
    output_dir: Path
    record: Record = field(repr=False)


def make_job(config: ExtractConfig, engine: Engine | None = None, record: Record | None = None) -> Job:
    """Check layer ids and input.

    Args:
        config: what was asked for.
        engine: the caller's own, whose layer ids are the default then.
        record: of the same run, whose check of the input is taken over as long as the input is untouched.

    Raises:
        UsageError: layer ids that will not do, or prompts that would be cut.
        InputError: an input that will not do.
    """
    facts = read_model_facts(config.model, config.engine_options)
    asked = engine.layer_ids if engine and config.layer_ids is None else config.layer_ids
    layer_ids = choose_layer_ids(asked, facts)
    max_model_len = min(config.max_seq_len + 1, facts.max_positions or config.max_seq_len + 1)
    checked = _check_input(config, max_model_len - 1, facts.vocab_size, record)
    if config.generate and checked.num_truncated:
        raise UsageError(
            f"{checked.num_truncated} of {checked.num_samples} prompts have more than {checked.max_tokens} tokens, and "
            "the answer to a prompt that is cut is one to another question. Give a higher --max-seq-len, or --overlong "
            "skip or fail"
        )
    revision = find_revision(config.model, config.engine_options)
    if config.trust_remote_code and revision is None:
        raise UsageError(
            f"--trust-remote-code runs whatever code {config.model} has when it is fetched, and which revision that is "
            "is not known. Give --engine-option 'revision=\"COMMIT\"', or a local folder"
        )
    return Job(layer_ids, facts.num_layers, max_model_len, checked, revision)


def make_plan(config: ExtractConfig, engine: Engine | None = None) -> Plan:
    """Check layer ids, format, output folder and input; the output folder is made.

    Args:
        config: what was asked for.
        engine: the caller's own, whose layer ids are the default then.

    Raises:
        UsageError: layer ids, prompts or an output folder that will not do.
        InputError: an input that will not do.
        JournalError: a record in the output folder that cannot be understood.
    """
    if not os.fspath(config.output_dir):
        raise UsageError("no output_dir is given; stream() is the one that goes without")
    facts = read_model_facts(config.model, config.engine_options)
    asked = engine.layer_ids if engine and config.layer_ids is None else config.layer_ids
    form = get_format(config.format)
    form.check(choose_layer_ids(asked, facts), facts.num_layers)
    output_dir = _output_folder(Path(config.output_dir))
    before = read_record(output_dir)
    job = make_job(config, engine, before)
    identity = identify(config, job.layer_ids, job.input, job.revision)
    if before and before.identity != identity:
        with locked_folder(output_dir):  # to look at a lock is to hold it for a moment, in which its owner-to-be fails
            begun = has_begun(output_dir)
        if begun:
            check_same_run(output_dir, before.identity, identity)
    return Plan(
        layer_ids=job.layer_ids,
        num_layers=job.num_layers,
        max_model_len=job.max_model_len,
        input=job.input,
        revision=job.revision,
        format=form,
        output_dir=output_dir,
        record=record_of(config, identity, job.input),
    )


def check_engine(job: Job, engine: Engine) -> None:
    """What ``config.json`` did not say, the engine knows: check it before the first request.

    Raises:
        UsageError: the engine captures other layers, or its context is too short.
        InputError: a token id outside its vocabulary.
    """
    check_layer_ids(job.layer_ids, engine.num_layers)
    if engine.layer_ids != job.layer_ids:
        raise UsageError(f"the engine captures the layers {engine.layer_ids}, {job.layer_ids} were asked for")
    if isinstance(job, Plan):
        job.format.check(job.layer_ids, engine.num_layers)
    if job.input.longest >= engine.max_model_len:
        raise UsageError(
            f"a sample has {job.input.longest} tokens, and with the token sampled after it the engine takes "
            f"{engine.max_model_len}. Lower max_seq_len to {engine.max_model_len - 1}"
        )
    token_id, line = job.input.highest
    if token_id >= engine.vocab_size:
        text = f"input_ids has {token_id}; the model's vocabulary has {engine.vocab_size} ids, from 0"
        raise InputError(str(job.input.path), [InputProblem(line, text)])


def _check_input(config: ExtractConfig, max_tokens: int, vocab_size: int | None, record: Record | None) -> CheckedInput:
    path = Path(config.prepared_data)
    told: Any = record.input.get("tokenizer") if record else None
    tokenizer = TokenizerSource.of_engine(
        config.model,
        config.engine_options,
        trust_remote_code=config.trust_remote_code,
        date=told["date"] if told else None,
    )
    merges = bool(os.fspath(config.output_dir)) and may_merge(config)
    if record:
        known = record.checked_input(
            path, max_tokens, vocab_size, config.num_samples, overlong=config.overlong, tokenizer=tokenizer
        )
        if known and not (merges and known.num_duplicates):
            return known
        if known and (duplicates := read_duplicates(Path(config.output_dir), known)):
            return replace(known, duplicates=duplicates)
    return check_input(
        path,
        max_tokens=max_tokens,
        vocab_size=vocab_size,
        num_samples=config.num_samples,
        overlong=config.overlong,
        tokenizer=tokenizer,
        find_duplicates=merges,
    )


def _output_folder(folder: Path) -> Path:
    try:
        make_folder(folder)
    except StorageError as error:
        if error.errno not in _OF_THE_NAME:
            raise
        raise UsageError(f"the output folder {folder} cannot be used: {error.__cause__}") from error
    if not folder.is_dir():
        raise UsageError(f"the output folder {folder} cannot be used: it is a file")
    return folder
