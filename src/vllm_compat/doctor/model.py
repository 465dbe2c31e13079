"""The doctor's verdict on one model: can it be captured here, by which path, and what vLLM's own would do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vllm_compat.detection import Detection
from vllm_compat.doctor.capture import Capture, judge_capture
from vllm_compat.doctor.config import ModelConfig, read_config
from vllm_compat.doctor.faults import judge_faults
from vllm_compat.doctor.native import decide_natively, judge_native
from vllm_compat.doctor.platforms import built_for
from vllm_compat.doctor.runner import judge_runner
from vllm_compat.doctor.source import Source
from vllm_compat.doctor.statement import Statement
from vllm_compat.errors import UnsupportedModelError, UsageError, VllmNotFoundError
from vllm_compat.extract.model import choose_layer_ids
from vllm_compat.types import NORM

__all__ = ["ModelVerdict", "judge_model"]

_LOAD_DECIDES = "by source; the rehearsal of the load decides"
_IDS_EXPLAINED = "README, Layer ids"


@dataclass(frozen=True, slots=True)
class ModelVerdict:
    """What the doctor says of one model.

    Attributes:
        decision: whether it can be captured here. Its value is True, False, or None where the source does not tell.
        runner: which of vLLM's runners would run it.
        statements: on the model and its capture.
        natively: whether vLLM's own extraction would do.
        native: what that rests on; empty where the source does not show the model.
    """

    decision: Statement
    runner: Statement
    statements: tuple[Statement, ...]
    natively: Statement
    native: tuple[Statement, ...]

    def require_capture(self) -> None:
        """Refuse a model that cannot be captured.

        Raises:
            UnsupportedModelError: with the reason.
        """
        if self.decision.value is False:
            raise UnsupportedModelError(self.decision.text)


def judge_model(found: Detection, model: str) -> ModelVerdict:
    """Judge the model in the folder ``model``.

    Raises:
        UsageError: not a folder with a readable ``config.json``.
        VllmNotFoundError: no vLLM to judge it by.
    """
    config = read_config(model)
    if found.installed is None:
        raise VllmNotFoundError
    platform = built_for(found)
    source = Source(found.installed.package, platform)
    capture = judge_capture(source, config)
    faults = tuple(judge_faults(found, config))
    native = judge_native(source, config, capture, cpu=platform == "cpu")
    return ModelVerdict(
        decision=_decide(found, config, capture, faults),
        runner=judge_runner(source, config.architectures, cpu=platform == "cpu"),
        statements=(*capture.statements, *_numbers(config), *faults),
        natively=decide_natively(native),
        native=native,
    )


def _decide(found: Detection, config: ModelConfig, capture: Capture, faults: Sequence[Statement]) -> Statement:
    captured, why = (capture.captured, capture.why_not) if found.supported else (False, found.standing)
    if captured is False:
        return Statement("model", False, f"no, it cannot be captured here: {why}", "what stands under model")
    if captured is None:
        text = f"not told: {why} ({_LOAD_DECIDES})"
    else:
        count, _ = config.num_layers
        layers = f"all {count} layers (0 to {count - 1})" if count else "all layers"
        decoder = next(s.value for s in capture.statements if s.name == "decoder")
        text = f"yes, {layers} and {NORM} can be captured, by taps on {decoder} ({_LOAD_DECIDES})"
    if faults:
        text += f". This CPU build has faults here: {', '.join(s.name for s in faults)}"
    return Statement("model", captured, text, "what stands under model")


def _numbers(config: ModelConfig) -> Iterator[Statement]:
    count, key = config.num_layers
    where = config.path.name
    yield Statement("layers", count, f"{count or 'not told'}", f"{where}: {key}")
    width, width_key = config.hidden_size
    yield Statement("hidden_size", width, f"{width or 'not told'}", f"{where}: {width_key}")
    if not count:
        return
    yield Statement("layer_ids", [*range(count), NORM], f"0 to {count - 1}, and {NORM}", f"{where}: {key}")
    text = f"1 to {count}: the state leaving layer k is id k + 1 in vLLM's own configuration"
    yield Statement("native_layer_ids", [*range(1, count + 1)], text, _IDS_EXPLAINED)
    try:
        default = choose_layer_ids(None, config.facts)
    except UsageError as error:
        yield Statement("default_layer_ids", None, str(error), _IDS_EXPLAINED)
    else:
        native = " ".join(str(i + 1) for i in default if isinstance(i, int))
        text = f"{' '.join(map(str, default))}; {native} in vLLM's own configuration"
        yield Statement("default_layer_ids", [*default], text, _IDS_EXPLAINED)
