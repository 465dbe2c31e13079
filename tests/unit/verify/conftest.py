"""Runs to verify: of made-up states, and of a small model that HF transformers computes in the engine's place."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from vllm_compat.extract import ExtractConfig, extract
from vllm_compat.testing import FakeEngine, FakeRequest
from vllm_compat.types import CapturedStates, LayerId
from vllm_compat.verify import Verdict, VerifyConfig, verify

LAYERS: tuple[LayerId, ...] = (2, 0, "norm")
HIDDEN = 8
VOCABULARY = 256

MakeRun: TypeAlias = Callable[..., Path]
Verify: TypeAlias = Callable[..., Verdict]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """``make_run(rows=7)``: the folder of a complete run of ``FakeEngine``; other arguments are ``ExtractConfig``'s."""

    def make(rows: int = 7, **changes: Any) -> Path:
        model = tmp_path / "model"
        model.mkdir(exist_ok=True)
        config = {"num_hidden_layers": 8, "hidden_size": HIDDEN, "vocab_size": 1000, "max_position_embeddings": 4096}
        (model / "config.json").write_text(json.dumps(config))
        write_rows(tmp_path / "data.jsonl", rows, 1000)
        values: dict[str, Any] = {
            "model": str(model),
            "prepared_data": tmp_path / "data.jsonl",
            "output_dir": tmp_path / "out",
            "layer_ids": LAYERS,
            "save_dtype": "float32",
        }
        wanted = ExtractConfig(**(values | changes))
        engine = FakeEngine(wanted.layer_ids or (), num_layers=8, hidden_size=HIDDEN, make_tensor=np.array)
        extract(wanted, engine)
        return Path(wanted.output_dir)

    return make


def write_rows(path: Path, rows: int, vocabulary: int) -> None:
    """Rows of 2 to 39 tokens with loss masks and ids; line 2 is blank, so that lines and indices differ."""
    rng = random.Random(0)
    lengths = [rng.randrange(2, 40) for _ in range(rows)]
    lines = [
        json.dumps({"input_ids": [rng.randrange(vocabulary) for _ in range(n)], "loss_mask": [1] * n, "id": f"r{i}"})
        for i, n in enumerate(lengths)
    ]
    path.write_text("\n".join([lines[0], "", *lines[1:]]) + "\n")


@pytest.fixture
def check() -> Verify:
    """``check(folder)``: the verdict on a run; other arguments are ``VerifyConfig``'s."""

    def run(folder: Path, **options: Any) -> Verdict:
        return verify(VerifyConfig(folder, **options))

    return run


def words(verdict: Verdict) -> list[str]:
    """The problems as they are printed."""
    return [str(problem) for problem in verdict.first]


class ModelEngine(FakeEngine):
    """Captures what a model of HF transformers computes, and samples what it makes the likeliest."""

    model: Any
    rename: Callable[[dict[LayerId, Any]], dict[LayerId, Any]]

    def get_captured_states(self, *, wait: bool = True) -> list[CapturedStates]:
        return [self._computed(states) for states in super().get_captured_states(wait=wait)]

    def _forward(self, request: FakeRequest, count: int) -> tuple[int, ...]:
        if not super()._forward(request, count):
            return ()
        _, logits = forward(self.model, request.all_token_ids[:-1])
        request.output_token_ids[-1] = int(logits[-1].argmax())
        return (request.output_token_ids[-1],)

    def _computed(self, captured: CapturedStates) -> CapturedStates:
        states = self.rename(forward(self.model, captured.token_ids)[0])
        return dataclasses.replace(captured, hidden_states=tuple(states[layer_id] for layer_id in captured.layer_ids))


def forward(model: Any, token_ids: Sequence[int]) -> tuple[dict[LayerId, Any], Any]:
    """Layer id -> state, and the logits; by ``output_hidden_states``, and a hook where that is behind the norm."""
    import torch

    last: list[Any] = []
    base = model.base_model
    layers = base.layers if hasattr(base, "layers") else base.h

    def keep(_module: Any, _arguments: Any, output: Any) -> None:
        last.append(output[0] if isinstance(output, tuple) else output)

    handle = layers[-1].register_forward_hook(keep)
    try:
        with torch.inference_mode():
            out = model(torch.tensor([list(token_ids)]), output_hidden_states=True, use_cache=False)
    finally:
        handle.remove()
    states: dict[LayerId, Any] = {k: state[0] for k, state in enumerate(out.hidden_states[1:-1])}
    states[len(states)] = last[0][0]
    states["norm"] = out.hidden_states[-1][0]
    return states, out.logits[0]


@pytest.fixture(scope="session")
def save_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``save_model("llama")``: the folder of a small random model of 5 layers, whose norms do not only divide."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("models")
    common = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5}
    llama = common | {"num_attention_heads": 4, "num_key_value_heads": 2}
    configs = {
        "llama": lambda: transformers.LlamaConfig(**llama, tie_word_embeddings=False),
        "gemma": lambda: transformers.GemmaConfig(**llama, head_dim=16),
        "gpt2": lambda: transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=5, n_head=4),
        "cohere": lambda: transformers.CohereConfig(**llama, eos_token_id=1, pad_token_id=0),
    }

    def make(name: str) -> Path:
        path = folder / name
        if not path.exists():
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(configs[name]()).float()
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1 and name != "gemma"), std=0.15)
            model.save_pretrained(path)
        return path

    return make


@pytest.fixture
def model_run(tmp_path: Path, save_model: Callable[[str], Path]) -> MakeRun:
    """``model_run("llama", (1, 3, 4))``: the folder of a run of that model.

    ``rename`` puts other states under the layers' names; other arguments are ``ExtractConfig``'s.
    """

    def make(
        name: str,
        layer_ids: tuple[LayerId, ...],
        rename: Callable[[dict[LayerId, Any]], dict[LayerId, Any]] = lambda states: states,
        rows: int = 12,
        dtype: str = "float32",
        **changes: Any,
    ) -> Path:
        import torch
        import transformers

        path = save_model(name)
        write_rows(tmp_path / "data.jsonl", rows, VOCABULARY)
        engine = ModelEngine(layer_ids, num_layers=5, hidden_size=64, vocab_size=VOCABULARY, eos_token_id=-1)
        engine.model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").to(
            getattr(torch, dtype)
        )
        engine.rename = rename
        values: dict[str, Any] = {
            "model": str(path),
            "prepared_data": tmp_path / "data.jsonl",
            "output_dir": tmp_path / "out",
            "layer_ids": layer_ids,
            "dtype": dtype,
            "save_dtype": dtype,
        }
        extract(ExtractConfig(**(values | changes)), engine)
        return tmp_path / "out"

    return make
