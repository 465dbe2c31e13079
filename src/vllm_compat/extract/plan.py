"""Everything that can be refused, is refused here: before a model is loaded."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from pathlib import Path

from vllm_compat._layers import check_layer_ids
from vllm_compat.engine import Engine
from vllm_compat.errors import InputError, InputProblem, StorageError, UsageError
from vllm_compat.extract.config import ExtractConfig
from vllm_compat.extract.files import make_folder
from vllm_compat.extract.identity import check_same_run, identify
from vllm_compat.extract.inputs import CheckedInput, check_input
from vllm_compat.extract.model import choose_layer_ids, read_model_facts
from vllm_compat.extract.record import Record, read_record, record_of
from vllm_compat.extract.revision import find_revision
from vllm_compat.formats import Format, get_format
from vllm_compat.types import LayerId

__all__ = ["Plan", "check_engine", "make_plan"]

_OF_THE_NAME = frozenset({errno.ENOTDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG})
_ELEMENT_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Plan:
    """A run that nothing speaks against.

    Attributes:
        layer_ids: what to capture.
        num_layers: decoder layers of the model; None where the model does not say.
        max_model_len: for the engine: the longest prompt and the token sampled after it.
        input: the checked input.
        format: how samples lie on disk.
        output_dir: an existing folder.
        revision: which weights the model's name stands for; None when not known.
        record: what ``run.json`` says of this run while it is not complete.
        bytes_per_token: of states on disk; None where the model's width or the dtype is not known yet.
    """

    layer_ids: tuple[LayerId, ...]
    num_layers: int | None
    max_model_len: int
    input: CheckedInput
    format: Format
    output_dir: Path
    revision: str | None
    record: Record = field(repr=False)
    bytes_per_token: int | None


def make_plan(config: ExtractConfig, engine: Engine | None = None) -> Plan:
    """Check layer ids, format, output folder and input; the output folder is made.

    Args:
        config: what was asked for.
        engine: the caller's own, whose layer ids are the default then.

    Raises:
        UsageError: layer ids or an output folder that will not do.
        InputError: an input that will not do.
        JournalError: a record in the output folder that cannot be understood.
    """
    facts = read_model_facts(config.model, config.engine_options)
    form = get_format(config.format)
    asked = engine.layer_ids if engine and config.layer_ids is None else config.layer_ids
    layer_ids = choose_layer_ids(asked, facts)
    form.check(layer_ids, facts.num_layers)
    max_model_len = min(config.max_seq_len + 1, facts.max_positions or config.max_seq_len + 1)
    output_dir = _output_folder(Path(config.output_dir))
    before = read_record(output_dir)
    checked = _check_input(config, max_model_len - 1, facts.vocab_size, before)
    revision = find_revision(config.model, config.engine_options)
    identity = identify(config, layer_ids, checked, revision)
    if before:
        check_same_run(output_dir, before.identity, identity)
    width, element = facts.hidden_size, _ELEMENT_BYTES.get(config.save_dtype)
    return Plan(
        layer_ids=layer_ids,
        num_layers=facts.num_layers,
        max_model_len=max_model_len,
        input=checked,
        format=form,
        output_dir=output_dir,
        revision=revision,
        record=record_of(config, identity, checked),
        bytes_per_token=len(layer_ids) * width * element if width and element else None,
    )


def check_engine(plan: Plan, engine: Engine) -> None:
    """What ``config.json`` did not say, the engine knows: check it before the first request.

    Raises:
        UsageError: the engine captures other layers, or its context is too short.
        InputError: a token id outside its vocabulary.
    """
    check_layer_ids(plan.layer_ids, engine.num_layers)
    if engine.layer_ids != plan.layer_ids:
        raise UsageError(f"the engine captures the layers {engine.layer_ids}, {plan.layer_ids} were asked for")
    plan.format.check(plan.layer_ids, engine.num_layers)
    if plan.input.longest >= engine.max_model_len:
        raise UsageError(
            f"a sample has {plan.input.longest} tokens, and with the token sampled after it the engine takes "
            f"{engine.max_model_len}. Lower max_seq_len to {engine.max_model_len - 1}"
        )
    token_id, line = plan.input.highest
    if token_id >= engine.vocab_size:
        text = f"input_ids has {token_id}; the model's vocabulary has {engine.vocab_size} ids, from 0"
        raise InputError(str(plan.input.path), [InputProblem(line, text)])


def _check_input(config: ExtractConfig, max_tokens: int, vocab_size: int | None, record: Record | None) -> CheckedInput:
    path = Path(config.prepared_data)
    known = record.checked_input(path, max_tokens, vocab_size, config.num_samples) if record else None
    return known or check_input(path, max_tokens=max_tokens, vocab_size=vocab_size, num_samples=config.num_samples)


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
