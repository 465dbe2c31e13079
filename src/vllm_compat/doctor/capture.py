"""Whether the taps would find what they need in a model: as far as its source tells."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from vllm_compat.doctor.config import ModelConfig
from vllm_compat.doctor.source import Class, Source, calls, self_assignments
from vllm_compat.doctor.stack import Stack, find_layer, find_stacks
from vllm_compat.doctor.statement import Statement

__all__ = ["Capture", "judge_capture"]

_REGISTRY = "model_executor/models/registry.py"
_AUTO_CLASSES = Path("models", "auto", "modeling_auto.py")  # where transformers lists its architectures
_HF_MODEL = ("model", "AutoModel.from_config")  # what vLLM's Transformers backend makes its whole model by
_MOST_PARTS = 2  # see _adapters/states.py: the residual stream, or its two summands


@dataclass(frozen=True, slots=True)
class Capture:
    """What the source tells.

    Attributes:
        statements: each step of the way, from the architecture to a layer's output. The value of one that speaks
            against capturing is False, of one that is not told None.
        model: the class that serves the architecture.
        stack: its decoder layers.
    """

    statements: tuple[Statement, ...]
    model: Class | None = None
    stack: Stack | None = None

    @property
    def captured(self) -> bool | None:
        """True, False, or None where the source does not tell."""
        values = [s.value for s in self.statements]
        return False if False in values else None if None in values else True

    @property
    def why_not(self) -> str:
        """What speaks against it, or is not told; empty where all is well."""
        return next((s.text for s in self.statements if s.value in (False, None)), "")


def judge_capture(source: Source, config: ModelConfig) -> Capture:
    """Follow the architecture to the class that serves it, its decoder layers and what these put out."""
    name, row = next(
        ((a, source.registry[a]) for a in config.architectures if a in source.registry),
        (", ".join(config.architectures), None),
    )
    if row is None:
        return Capture((_unregistered(source, config, name),))
    if not row.generates:
        kind = row.table.strip("_").lower().replace("_", " ")
        text = f"{name} is one of vLLM's {kind}: it answers no request of ours"
        return Capture((Statement("architecture", False, text, row.place),))
    statements = [Statement("architecture", name, f"{name} is in the model registry", row.place)]
    model = source.find_class(row.module, row.name)
    if model is None:
        text = f"{row.module} has no class {row.name} that the source shows"
        return Capture((*statements, Statement("class", None, text, row.place)))
    statements.append(_class(source, model))
    stacks = find_stacks(source, model, config.inner)
    stack = stacks[0] if len(stacks) == 1 else None
    statements += [_decoder(source, model, stacks), *_layer(source, stack), *_streams(source, stack)]
    return Capture(tuple(statements), model, stack)


def _unregistered(source: Source, config: ModelConfig, name: str) -> Statement:
    if not name:
        text = "config.json names no architecture; vLLM guesses one from the model's type"
        return Statement("architecture", None, text, config.path.name)
    text = f"{name} is not in the model registry"
    evidence = f"{_REGISTRY}: not there"
    old = source.previously_supported(name)
    if old:
        text, evidence = f"{text}; {old[0]} was the last release that had it", old[1]
    if _transformers_has(name) or config.auto_map:
        text += "; vLLM's Transformers backend may serve it, and its layers can be captured"
        return Statement("architecture", None, text, evidence)
    text += ", and transformers does not have it: this vLLM cannot serve it"
    return Statement("architecture", False, text, evidence)


def _transformers_has(architecture: str) -> bool:
    spec = find_spec("transformers")
    try:
        text = (Path(spec.origin).parent / _AUTO_CLASSES).read_text(encoding="utf-8") if spec and spec.origin else ""
    except OSError:
        return False
    return f'"{architecture}"' in text


def _class(source: Source, model: Class) -> Statement:
    text = f"{model.name} in {model.home}"
    return Statement("class", f"{model.home}:{model.name}", text, source.place(model.home, model.node))


def _hf_model(source: Source, model: Class) -> str | None:
    """Where the class has transformers make the whole model, as those of vLLM's Transformers backend do."""
    for owner in source.lineage(model):
        for name, call in self_assignments(owner.node):
            if (name, ast.unparse(call.func)) == _HF_MODEL:
                return source.place(owner.home, call)
    return None


def _decoder(source: Source, model: Class, stacks: list[Stack]) -> Statement:
    if not stacks:
        text, place = "no list of layers is seen in the source", _hf_model(source, model)
        if place:
            text = f"{model.name} runs transformers' own layers, which can be captured, but {text}"
        return Statement("decoder", None, text, place or source.place(model.home, model.node))
    names = [f"{s.cls.name}.{s.name}" for s in stacks]
    if len(stacks) > 1:
        text = f"none of the lists of layers is beside the vocabulary's embedding: {', '.join(names)}"
        return Statement("decoder", None, text, stacks[0].place)
    beside = "beside the vocabulary's embedding" if stacks[0].beside_embedding else "the only list of layers"
    return Statement("decoder", names[0], f"{names[0]}, {beside}", stacks[0].place)


def _layer(source: Source, stack: Stack | None) -> Iterator[Statement]:
    layer = find_layer(source, stack) if stack else None
    if layer:
        text = f"{layer.name} returns {layer.returns}"
        if (layer.parts or 0) <= _MOST_PARTS:
            yield Statement("layer", layer.returns, text, layer.place)
        else:
            yield Statement("layer", False, f"{text}; a tap wants the residual stream or its two summands", layer.place)


def _streams(source: Source, stack: Stack | None) -> Iterator[Statement]:
    """Hyper-connections: before the layers, the forward makes several streams of the state."""
    forward = source.method(stack.cls, "forward") if stack else None
    for call in calls(forward[1], "repeat") if forward else ():
        if forward and ".unsqueeze(" in ast.unparse(call.func):
            text = f"several residual streams, {ast.unparse(call)}; a tap wants [rows, hidden_size]"
            yield Statement("streams", False, text, source.place(forward[0].home, call))
