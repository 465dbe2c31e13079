"""What vLLM's own extraction would do, and which runner would run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.doctor.tree import (
    DEEPSEEK_WITH_LAST,
    KIMI_CONFIG,
    LLAMA,
    LLAMA_CONFIG,
    MODELS,
    NATIVE,
    find,
    judge,
    said,
)  # fmt: skip

CONNECTOR = "distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector"


@pytest.mark.parametrize("absent", ["v1/spec_decode/extract_hidden_states", CONNECTOR])
def test_a_vllm_without_extraction(absent: str, tmp_path: Path) -> None:
    verdict = judge(tmp_path, LLAMA_CONFIG, add={k: v for k, v in NATIVE.items() if k != absent})
    assert said(verdict.native) == {"exists": False}
    assert find(verdict.native, "exists").evidence == f"{absent}.py: not there"
    assert verdict.natively.value is False


def test_a_model_that_vllm_can_extract_by_itself(tmp_path: Path) -> None:
    verdict = judge(tmp_path, LLAMA_CONFIG, add=NATIVE)
    facts = said(verdict.native)
    room = facts.pop("cache_bytes_per_token")
    assert facts == {"exists": True, "allowed": True, "interface": True, "last_id": True}
    assert room == 4 * 7168 * 2  # 57,344 bytes: Kimi-K2.5's, as measured in vllm-internals
    assert (verdict.natively.value, verdict.natively.text) == (True, "yes, by source")


def test_the_list_of_allowed_model_types(tmp_path: Path) -> None:
    allowed = 'def verify(self):\n    aux_hidden_states_supported = ["llama", "qwen"]\n'
    add = {**NATIVE, "config/speculative": allowed}
    assert find(judge(tmp_path / "a", {**LLAMA_CONFIG, "model_type": "qwen3_moe"}, add=add).native, "allowed").value
    refused = judge(tmp_path / "b", KIMI_CONFIG, add=add)
    gate = find(refused.native, "allowed")
    assert (gate.value, gate.evidence) == (False, "config/speculative.py:2")
    assert gate.text == "model type 'deepseek_v3' is not among those allowed: llama, qwen"
    assert refused.natively.value is False


def test_a_model_without_the_interface(tmp_path: Path) -> None:
    verdict = judge(tmp_path, {**LLAMA_CONFIG, "architectures": ["Qwen3ForCausalLM"]}, add=NATIVE)
    assert find(verdict.native, "interface").value is False
    assert "Qwen3ForCausalLM has not the interface SupportsEagle3" in verdict.natively.text


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_last_layer_of_a_model_that_looks_before_each_layer_is_absent(wrapped: bool, tmp_path: Path) -> None:
    config = {**KIMI_CONFIG["text_config"]} if not wrapped else KIMI_CONFIG
    before = judge(tmp_path / "before", config, add=NATIVE)
    last = find(before.native, "last_id")
    assert last.value is False
    assert last.text == ("id 61, the last layer's output, is silently absent: ids are looked at before a layer only")
    assert last.evidence.startswith(f"{MODELS}/deepseek_v2.py:")
    after = judge(tmp_path / "after", config, add={**NATIVE, f"{MODELS}/deepseek_v2": DEEPSEEK_WITH_LAST})
    assert find(after.native, "last_id").text == "id 61, the last layer's output, can be had"


def test_a_model_that_puts_out_no_auxiliary_states(tmp_path: Path) -> None:
    verdict = judge(tmp_path, {**LLAMA_CONFIG, "architectures": ["HunYuanForCausalLM"]}, add=NATIVE)
    assert find(verdict.native, "last_id").text == "HunYuanModel puts out no auxiliary states"


def test_things_to_mind_are_no_refusal(tmp_path: Path) -> None:
    chunks = 'raise ValueError("ExampleHiddenStatesConnector does not support chunked prefill. ")\n'
    add = {**NATIVE, CONNECTOR: "class ExampleHiddenStatesConnector: ...\n", "config/vllm": chunks}
    verdict = judge(tmp_path, LLAMA_CONFIG, add=add)
    facts = said(verdict.native)
    assert (facts["one_writer"], facts["chunked_prefill"]) == (False, False)
    assert verdict.natively.value is True
    assert verdict.natively.text == (
        "yes, but mind: each tensor-parallel rank writes every file, to the same path; refused with chunked prefill, "
        "which is on by default"
    )


def test_a_connector_of_cuda_events_on_a_cpu_build(tmp_path: Path) -> None:
    on_gpu = judge(tmp_path / "gpu", LLAMA_CONFIG, add=NATIVE)
    assert "device" not in said(on_gpu.native)
    on_cpu = judge(tmp_path / "cpu", LLAMA_CONFIG, add=NATIVE, version="0.99.0+cpu")
    assert find(on_cpu.native, "device").evidence == f"{CONNECTOR}.py:4"
    assert on_cpu.natively.value is False


def test_nothing_is_said_of_a_model_that_the_source_does_not_show(tmp_path: Path) -> None:
    verdict = judge(tmp_path, {**LLAMA_CONFIG, "architectures": ["NoSuchForCausalLM"]}, add=NATIVE)
    assert verdict.native == ()
    assert verdict.natively.value is None


VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
ENVS = {"envs": f"{VARIABLE}: bool = False\n"}
DECIDES = """
DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES = frozenset({"LlamaForCausalLM"})

class VllmConfig:
    def use_v2_model_runner(self): ...
"""
BY_LIST = DECIDES + "    def _is_default_v2_model_runner_model(self):\n        return arch in DEFAULT\n"
BY_KIND = DECIDES + "    def _is_default_v2_model_runner_model(self):\n        return not self.model_config.is_moe\n"


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A package of that name can be found; it is never imported."""
    (tmp_path / "site" / "triton").mkdir(parents=True)
    (tmp_path / "site" / "triton" / "__init__.py").write_text("raise RuntimeError", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path / "site")


def runner(tmp_path: Path, **options: Any) -> tuple[Any, str]:
    found = judge(tmp_path, LLAMA_CONFIG, **options).runner
    return found.value, found.text


def test_the_only_runner_there_is(tmp_path: Path) -> None:
    assert runner(tmp_path, v2_runner=False) == ("V1", "V1, the only one that this vLLM has")


def test_a_cpu_worker_that_knows_one_runner(tmp_path: Path) -> None:
    add = {"v1/worker/cpu_worker": "class CPUWorker: ...\n"}
    text = "V1, the only one that its CPU worker knows"
    assert runner(tmp_path, version="0.99.0+cpu", add=add) == ("V1", text)


@pytest.mark.parametrize(("value", "which"), [("0", "V1"), ("1", "V2")])
def test_the_variable_decides(value: str, which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, value)
    assert runner(tmp_path / "a", add=ENVS) == (which, f"{which}, as {VARIABLE}={value} says")
    assert runner(tmp_path / "b") == ("V1", f"V1, unless {VARIABLE}=1 asks for V2")  # a vLLM that does not know it


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize(
    ("config", "value", "text"),
    [
        ("", "V1", f"V1, unless {VARIABLE}=1 asks for V2"),
        (DECIDES, None, "decided at start: V2 where Triton works, V1 otherwise"),
        (BY_LIST, None, "decided at start, by the model: V2 for some where Triton works, V1 otherwise"),
        (BY_LIST.replace('"Llama', '"Other'), "V1", "V1: the model is not in DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES"),
        (BY_KIND.replace('"Llama', '"Other'), None,
         "decided at start, by the model: V2 for some where Triton works, V1 otherwise"),
    ],
)  # fmt: skip
def test_what_vllm_decides_by_itself(
    config: str, value: str | None, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert runner(tmp_path, add={**ENVS, "config/vllm": config}) == (value, text)


def test_without_triton_there_is_no_v2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr("sys.path", [])
    assert runner(tmp_path, add={"config/vllm": DECIDES}) == ("V1", "V1: V2 needs Triton, and that is not installed")


def test_the_ids_are_found_whatever_the_forward_calls_them(tmp_path: Path) -> None:
    other = LLAMA.replace("idx + 1", "layer_idx - self.start_layer + 1")
    verdict = judge(tmp_path, LLAMA_CONFIG, add={**NATIVE, f"{MODELS}/llama": other})
    assert find(verdict.native, "last_id").value is True
