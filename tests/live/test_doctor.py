"""The doctor's reading of this vLLM's source against this vLLM itself; no engine is opened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import models
import pytest
import transformers

from conftest import ON_GPU
from vllm_compat import detect
from vllm_compat.doctor.platforms import built_for
from vllm_compat.doctor.source import Source

TEXT = {**models._deepseek_config(), "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**models._COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen3": {**models._COMMON, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 64},
    "gemma": {**models._COMMON, "architectures": ["GemmaForCausalLM"], "model_type": "gemma", "head_dim": 64},
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": models.VOCAB,
        "n_positions": 1024,
        "n_embd": 128,
        "n_layer": 6,
        "n_head": 4,
    },
    "deepseek_v3": TEXT,
    "kimi_k25": {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": TEXT,
        "vision_config": {"num_hidden_layers": TEXT["num_hidden_layers"]},
    },
    "mamba": {**models._COMMON, "architectures": ["MambaForCausalLM"], "model_type": "mamba", "state_size": 16},
    "bamba": {**models._COMMON, "architectures": ["BambaForCausalLM"], "model_type": "bamba"},
    "unknown": {**models._COMMON, "architectures": ["NoSuchForCausalLM"], "model_type": "nosuch"},
    # Of vLLM's Transformers backend: one that its registry names for it, and one that it does not name.
    "smollm3": {**models._COMMON, "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"},
    "helium": {**models._COMMON, "architectures": ["HeliumForCausalLM"], "model_type": "helium", "head_dim": 32},
}
# All but mamba, bamba and smollm3 are captured, and compared with HF, by test_states.
LAYERS = {name: 4 if name in ("deepseek_v3", "kimi_k25") else 6 for name in CONFIGS}


def doctor(folder: Path, name: str) -> tuple[int, dict[str, Any]]:
    """Exit code and report of the real command."""
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    done = subprocess.run(
        [sys.executable, "-m", "vllm_compat", "doctor", "--json", "--model", str(folder)],
        env={**os.environ, "VLLM_USE_V2_MODEL_RUNNER": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def source_line(statement: dict[str, Any]) -> str:
    """The line of vLLM's source that a statement gives as its evidence."""
    path, line = statement["evidence"].split(":")
    installed = detect().installed
    assert installed
    return (installed.package / path).read_text().splitlines()[int(line) - 1]


def registry() -> Any:
    from vllm.model_executor.models.registry import ModelRegistry

    return ModelRegistry


def test_the_registry_as_source_is_the_registry() -> None:
    found = detect()
    assert found.installed
    source = Source(found.installed.package, built_for(found))
    rows = {name: (row.module, row.name) for name, row in source.registry.items()}
    registered = registry().models
    # All but what a rehearsal in this process put into its place.
    lazy = {name: (m.module_name, m.class_name) for name, m in registered.items() if hasattr(m, "module_name")}
    assert rows.keys() <= registered.keys()
    assert len(lazy) > 100
    assert {name: row for name, row in rows.items() if name in lazy} == lazy


@pytest.mark.parametrize("name", CONFIGS)
def test_what_the_doctor_says_of_a_model_is_so(name: str, tmp_path: Path) -> None:
    code, report = doctor(tmp_path, name)
    architecture, decision = CONFIGS[name]["architectures"][0], report["decision"]["model"]["value"]
    if architecture not in registry().models:
        wanted = (0, None, None) if hasattr(transformers, architecture) else (3, False, False)
        assert (code, decision, report["model"]["architecture"]["value"]) == wanted
        return
    model = registry().models[architecture].load_model_cls()
    assert report["model"]["class"]["value"] == f"{model.__module__}:{model.__qualname__}"
    assert source_line(report["model"]["class"]).startswith(f"class {model.__name__}")
    decoder = report["model"]["decoder"]
    if ".transformers" in model.__module__:
        assert (code, decision, decoder["value"]) == (0, None, None)
        assert "AutoModel.from_config(" in source_line(decoder)
    else:
        assert (code, decision) == (0, True)
        assert report["model"]["layer_ids"]["value"] == [*range(LAYERS[name]), "norm"]
        assert f"self.{decoder['value'].rpartition('.')[2]} = " in source_line(decoder)
    if report["native"]["exists"]["value"]:
        from vllm.model_executor.models.interfaces import supports_eagle3

        assert report["native"]["interface"]["value"] is supports_eagle3(model)


@pytest.mark.skipif(ON_GPU, reason="what a GPU has decides there")
def test_the_runner_that_is_foretold_is_the_one_that_vllm_chooses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, report = doctor(tmp_path, "llama")
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    from vllm import envs
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True, dtype="float32").create_engine_config()
    chosen = getattr(config, "use_v2_model_runner", getattr(envs, "VLLM_USE_V2_MODEL_RUNNER", False))
    assert report["decision"]["runner"]["value"] in (None, "V2" if chosen else "V1")
    assert report["model"]["layers"]["value"] == config.model_config.hf_text_config.num_hidden_layers
    assert report["model"]["hidden_size"]["value"] == config.model_config.get_hidden_size()
