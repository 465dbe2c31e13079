"""What vLLM's own extraction of hidden states would do with a model, item by item."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from vllm_compat.doctor.capture import Capture
from vllm_compat.doctor.config import ModelConfig
from vllm_compat.doctor.source import Class, Source, calls
from vllm_compat.doctor.stack import Stack
from vllm_compat.doctor.statement import Statement

__all__ = ["decide_natively", "judge_native"]

_PROPOSER = "v1/spec_decode/extract_hidden_states.py"
_CONNECTOR = "distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py"
_SPECULATIVE = "vllm.config.speculative"
_ALLOWED = "aux_hidden_states_supported"
_IDS = "aux_hidden_state_layers"
_ADD = "_maybe_add_hidden_state"
_BYTES = 2  # of a bfloat16 value
_TO_MIND = ("one_writer", "chunked_prefill")  # one rank has no such problem, and an option turns chunks off
_BELOW = "what stands under native"
_IDS_COUNTED = 4  # as many as extraction takes by default


def judge_native(source: Source, config: ModelConfig, capture: Capture, *, cpu: bool) -> tuple[Statement, ...]:
    """Each thing that ``extract_hidden_states`` stands on, False where it is missing; nothing for an unknown model."""
    if capture.model is None:
        return ()
    absent = next((path for path in (_PROPOSER, _CONNECTOR) if source.find_text(path, "") is None), None)
    if absent:
        text = "this vLLM has no extraction of hidden states of its own"
        return (Statement("exists", False, text, f"{absent}: not there"),)
    return (
        Statement("exists", True, "method extract_hidden_states, ExampleHiddenStatesConnector", f"{_PROPOSER}:1"),
        _gate(source, config),
        _interface(source, capture.model),
        *([_last_id(source, config, capture.stack)] if capture.stack else []),
        *_ranks(source),
        *_chunks(source),
        *(_cuda(source) if cpu else []),
        *_room(config),
    )


def decide_natively(statements: Sequence[Statement]) -> Statement:
    """False where something is missing, which is more than a thing to mind."""
    wrong = [s for s in statements if s.value is False]
    missing = [s.text for s in wrong if s.name not in _TO_MIND]
    told = "; ".join(missing or [s.text for s in wrong])
    if not statements:
        return Statement("natively", None, "not told: the source does not show the model", _BELOW)
    if missing:
        return Statement("natively", False, f"no, or not whole: {told}", _BELOW)
    return Statement("natively", True, f"yes, but mind: {told}" if told else "yes, by source", _BELOW)


def _gate(source: Source, config: ModelConfig) -> Statement:
    model_type = str(config.text.get("model_type", ""))
    for node in source.assignments(_SPECULATIVE, _ALLOWED):
        if isinstance(node.value, ast.List):
            allowed = [str(e.value) for e in node.value.elts if isinstance(e, ast.Constant)]
            fits = any(name in model_type for name in allowed)
            verb = "is" if fits else "is not"
            text = f"model type {model_type!r} {verb} among those allowed: {', '.join(allowed)}"
            return Statement("allowed", fits, text, source.place(_SPECULATIVE, node))
    return Statement("allowed", True, "no list of allowed models", f"{_SPECULATIVE}: no {_ALLOWED}")


def _interface(source: Source, model: Class) -> Statement:
    has = any(cls.name == "SupportsEagle3" for cls in source.lineage(model))
    text = f"{model.name} {'has' if has else 'has not'} the interface SupportsEagle3"
    return Statement("interface", has, text, source.place(model.home, model.node))


def _last_id(source: Source, config: ModelConfig, stack: Stack) -> Statement:
    """Whether the state leaving the last layer, vLLM's id n, can be had.

    A model that looks at its ids on top of the loop only, before a layer, never comes to n and says nothing.
    """
    last, _ = config.num_layers
    name = "the last layer's output" if last is None else f"id {last}, the last layer's output,"
    found = source.method(stack.cls, "forward")
    asked = list(_asked_ids(found[1])) if found else []
    if not found or not asked:
        place = source.place(found[0].home, found[1]) if found else stack.place
        return Statement("last_id", False, f"{stack.cls.name} puts out no auxiliary states", place)
    reached = [node for node in asked if "+ 1" in ast.unparse(node) or "end_layer" in ast.unparse(node)]
    node = (reached or asked)[0]
    how = "can be had" if reached else "is silently absent: ids are looked at before a layer only"
    return Statement("last_id", bool(reached), f"{name} {how}", source.place(found[0].home, node))


def _asked_ids(forward: ast.FunctionDef) -> Iterator[ast.expr]:
    """The ids that a forward looks for among those it was asked for."""
    for node in ast.walk(forward):
        if (
            isinstance(node, ast.Compare)
            and isinstance(node.ops[0], ast.In)
            and _IDS in ast.unparse(node.comparators[0])
        ):
            yield node.left
    for call in calls(forward, _ADD):
        if len(call.args) > 1:
            yield call.args[1]


def _ranks(source: Source) -> Iterator[Statement]:
    if source.find_text(_CONNECTOR, "rank") is None:
        text = "each tensor-parallel rank writes every file, to the same path"
        yield Statement("one_writer", False, text, f"{_CONNECTOR}: no rank in it")


def _chunks(source: Source) -> Iterator[Statement]:
    place = source.find_text("config/vllm.py", "ExampleHiddenStatesConnector does not support chunked prefill")
    if place:
        yield Statement("chunked_prefill", False, "refused with chunked prefill, which is on by default", place)


def _cuda(source: Source) -> Iterator[Statement]:
    place = source.find_text(_CONNECTOR, "= torch.cuda.Event()")
    if place:
        yield Statement("device", False, "its connector calls torch.cuda; this is a CPU build", place)


def _room(config: ModelConfig) -> Iterator[Statement]:
    width, _ = config.hidden_size
    if width:
        room = _IDS_COUNTED * width * _BYTES
        text = f"{room} bytes of KV cache for each token, on every rank, for {_IDS_COUNTED} layers in bfloat16"
        yield Statement("cache_bytes_per_token", room, text, f"{config.path.name}: {config.hidden_size[1]}")
