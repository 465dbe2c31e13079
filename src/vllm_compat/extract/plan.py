"""Everything that can be refused, is refused here: before a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vllm_compat._layers import check_layer_ids
from vllm_compat.engine import Engine
from vllm_compat.errors import InputError, InputProblem, UsageError
from vllm_compat.extract.config import ExtractConfig
from vllm_compat.extract.inputs import CheckedInput, check_input
from vllm_compat.extract.model import choose_layer_ids, read_model_facts
from vllm_compat.extract.writer import SAMPLE_FILES
from vllm_compat.types import LayerId

__all__ = ["Plan", "check_engine", "make_plan"]

_ELEMENT_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Plan:
    """A run that nothing speaks against.

    Attributes:
        layer_ids: what to capture.
        max_model_len: for the engine: the longest prompt and the token sampled after it.
        input: the checked input.
        output_dir: an existing folder without samples.
        bytes_per_token: of states on disk; None where the model's width or the dtype is not known yet.
    """

    layer_ids: tuple[LayerId, ...]
    max_model_len: int
    input: CheckedInput
    output_dir: Path
    bytes_per_token: int | None


def make_plan(config: ExtractConfig, engine: Engine | None = None) -> Plan:
    """Check layer ids, output folder and input; the output folder is made.

    Args:
        config: what was asked for.
        engine: the caller's own, whose layer ids are the default then.

    Raises:
        UsageError: layer ids or an output folder that will not do.
        InputError: an input that will not do.
    """
    facts = read_model_facts(config.model)
    asked = engine.layer_ids if engine and config.layer_ids is None else config.layer_ids
    layer_ids = choose_layer_ids(asked, facts)
    max_model_len = min(config.max_seq_len + 1, facts.max_positions or config.max_seq_len + 1)
    output_dir = _output_folder(Path(config.output_dir))
    checked = check_input(
        Path(config.prepared_data),
        max_tokens=max_model_len - 1,
        vocab_size=facts.vocab_size,
        num_samples=config.num_samples,
    )
    width, element = facts.hidden_size, _ELEMENT_BYTES.get(config.save_dtype)
    return Plan(
        layer_ids=layer_ids,
        max_model_len=max_model_len,
        input=checked,
        output_dir=output_dir,
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
    if plan.input.longest >= engine.max_model_len:
        raise UsageError(
            f"a sample has {plan.input.longest} tokens, and with the token sampled after it the engine takes "
            f"{engine.max_model_len}. Lower max_seq_len to {engine.max_model_len - 1}"
        )
    token_id, line = plan.input.highest
    if token_id >= engine.vocab_size:
        text = f"input_ids has {token_id}; the model's vocabulary has {engine.vocab_size} ids, from 0"
        raise InputError(str(plan.input.path), [InputProblem(line, text)])


def _output_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        old = next(folder.glob(SAMPLE_FILES), None)
    except OSError as error:
        raise UsageError(f"the output folder {folder} cannot be used: {error.strerror or error}") from error
    if old:
        raise UsageError(
            f"{folder} already has samples of an earlier run ({old.name}), which must not be mixed with new ones. Give "
            f"another output folder, or move its {SAMPLE_FILES} away"
        )
    return folder
