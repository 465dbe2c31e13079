"""What a model's folder says of it, for the doctor: ``config.json`` alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_compat.errors import UsageError
from vllm_compat.extract.model import NAMES, ModelFacts, read_model_facts

__all__ = ["ModelConfig", "read_config"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model's configuration.

    Attributes:
        path: the file.
        facts: what extraction knows of the model.
        architectures: as the file names them.
        inner: those of its language model, where that has a configuration of its own.
        text: the configuration of the language model, which for most models is the whole file.
        auto_map: the code that the model brings along.
    """

    path: Path
    facts: ModelFacts
    architectures: tuple[str, ...]
    inner: tuple[str, ...]
    text: dict[str, Any]
    auto_map: tuple[str, ...]

    @property
    def num_layers(self) -> tuple[int | None, str]:
        """Decoder layers, and the key that says so."""
        return self._number(NAMES["num_layers"])

    @property
    def hidden_size(self) -> tuple[int | None, str]:
        """Width of a state, and the key that says so."""
        return self._number(NAMES["hidden_size"])

    def _number(self, names: tuple[str, ...]) -> tuple[int | None, str]:
        return next(((self.text[n], n) for n in names if type(self.text.get(n)) is int), (None, names[0]))


def read_config(model: str) -> ModelConfig:
    """The configuration in the folder ``model``.

    Raises:
        UsageError: no local folder, or none with a readable ``config.json``.
    """
    facts = read_model_facts(model)
    if facts.why_unknown:
        raise UsageError(
            f"nothing is known of the model: {facts.why_unknown}. The doctor downloads nothing: give a folder with the "
            "model's config.json"
        )
    path = Path(model) / "config.json"
    whole: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    own = whole.get("text_config")
    text: dict[str, Any] = whole | own if isinstance(own, dict) else whole
    return ModelConfig(
        path=path,
        facts=facts,
        architectures=_names(whole.get("architectures")),
        inner=_names(own.get("architectures")) if isinstance(own, dict) else (),
        text=text,
        auto_map=tuple(whole["auto_map"]) if isinstance(whole.get("auto_map"), dict) else (),
    )


def _names(value: object) -> tuple[str, ...]:
    return tuple(v for v in value if isinstance(v, str)) if isinstance(value, list) else ()
