"""The way from an architecture to the decoder layers, in source."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.unit.doctor.tree import (
    DEEPSEEK,
    KIMI_CONFIG,
    LLAMA,
    LLAMA_CONFIG,
    MODELS,
    TEXT_CONFIG,
    find,
    judge,
    said,
    write_tree,
)  # fmt: skip

from vllm_compat import UnsupportedModelError, detect
from vllm_compat.doctor.source import Source


def config(architecture: str, **more: Any) -> Mapping[str, Any]:
    return {**LLAMA_CONFIG, "architectures": [architecture], **more}


def line(text: str, source: str) -> int:
    return next(n for n, found in enumerate(source.lstrip("\n").splitlines(), 1) if text in found)


def test_a_model_whose_layers_are_beside_the_embedding(tmp_path: Path) -> None:
    verdict = judge(tmp_path, LLAMA_CONFIG)
    assert verdict.decision.value is True
    assert verdict.decision.text == (
        "yes, all 61 layers (0 to 60) and norm can be captured, by taps on LlamaModel.layers (by source; the rehearsal "
        "of the load decides)"
    )
    verdict.require_capture()
    evidence = {s.name: (s.value, s.evidence) for s in verdict.statements}
    assert evidence["architecture"][0] == "LlamaForCausalLM"
    assert evidence["architecture"][1].startswith(f"{MODELS}/registry.py:")
    where = f"{MODELS}/llama.py:"
    llama = "vllm.model_executor.models.llama:LlamaForCausalLM"
    assert evidence["class"] == (llama, f"{where}{line('class LlamaForCausalLM', LLAMA)}")
    assert evidence["decoder"] == ("LlamaModel.layers", f"{where}{line('= make_layers(', LLAMA)}")
    assert evidence["layer"] == ("hidden_states, residual", f"{where}{line('return hidden_states, residual', LLAMA)}")


def test_the_ids_that_can_be_asked_for_and_those_of_vllm(tmp_path: Path) -> None:
    verdict = judge(tmp_path, LLAMA_CONFIG)
    facts = said(verdict.statements)
    assert (facts["layers"], facts["hidden_size"]) == (61, 7168)
    assert facts["layer_ids"] == [*range(61), "norm"]
    assert facts["native_layer_ids"] == [*range(1, 62)]
    assert facts["default_layer_ids"] == [2, 30, 58, 60]
    default = find(verdict.statements, "default_layer_ids").text
    assert default == "2 30 58 60; 3 31 59 61 in vLLM's own configuration"


def test_a_model_too_small_for_the_default_ids_is_told_what_to_do(tmp_path: Path) -> None:
    verdict = judge(tmp_path, {**LLAMA_CONFIG, "num_hidden_layers": 4})
    default = find(verdict.statements, "default_layer_ids")
    assert default.value is None
    assert "Give --layer-ids" in default.text


@pytest.mark.parametrize(("layers", "width"), [("n_layer", "n_embd"), ("n_layers", "d_model")])
def test_older_names_of_the_numbers(layers: str, width: str, tmp_path: Path) -> None:
    older = {"architectures": ["LlamaForCausalLM"], layers: 6, width: 128}
    verdict = judge(tmp_path, older)
    assert [(s.value, s.evidence) for s in verdict.statements if s.name in ("layers", "hidden_size")] == [
        (6, f"config.json: {layers}"),
        (128, f"config.json: {width}"),
    ]


def test_a_configuration_without_numbers(tmp_path: Path) -> None:
    verdict = judge(tmp_path, {"architectures": ["LlamaForCausalLM"]})
    assert verdict.decision.text.startswith("yes, all layers and norm")
    assert "layer_ids" not in said(verdict.statements)


def test_the_layer_class_that_a_derived_model_passes_to_its_base(tmp_path: Path) -> None:
    verdict = judge(tmp_path, config("Qwen3ForCausalLM"))
    assert find(verdict.statements, "decoder").value == "Qwen3Model.layers"
    assert find(verdict.statements, "layer").text == "Qwen3DecoderLayer returns hidden_states"


def test_a_wrapper_whose_language_model_is_named_in_its_source(tmp_path: Path) -> None:
    # The vision tower has a list of layers, too.
    verdict = judge(tmp_path, KIMI_CONFIG)
    assert find(verdict.statements, "decoder").value == "DeepseekV2Model.layers"
    assert said(verdict.statements)["layers"] == 61


def test_a_wrapper_whose_language_model_is_named_in_its_configuration(tmp_path: Path) -> None:
    verdict = judge(tmp_path, config("LlavaForConditionalGeneration", text_config=TEXT_CONFIG))
    assert find(verdict.statements, "decoder").value == "DeepseekV2Model.layers"


def test_the_only_list_of_layers_need_not_be_beside_the_embedding(tmp_path: Path) -> None:
    verdict = judge(tmp_path, config("PlamoForCausalLM"))
    assert verdict.decision.value is True
    assert find(verdict.statements, "decoder").text == "PlamoDecoder.layers, the only list of layers"


@pytest.mark.parametrize(
    ("architecture", "why"),
    [
        (
            "TwoListsForConditionalGeneration",
            "none of the lists of layers is beside the vocabulary's embedding: "
            "VisionEncoder.blocks, TextDecoder.layers",
        ),
        ("BareForCausalLM", "no list of layers is seen in the source"),
        ("LostForCausalLM", "vllm.model_executor.models.lost has no class LostForCausalLM that the source shows"),
    ],
)
def test_what_the_source_does_not_tell_is_left_to_the_load(architecture: str, why: str, tmp_path: Path) -> None:
    verdict = judge(tmp_path, config(architecture))
    assert verdict.decision.value is None
    assert verdict.decision.text == f"not told: {why} (by source; the rehearsal of the load decides)"
    verdict.require_capture()


def test_a_configuration_that_names_no_architecture(tmp_path: Path) -> None:
    verdict = judge(tmp_path, {"model_type": "llama"})
    assert verdict.decision.value is None
    assert "config.json names no architecture" in verdict.decision.text


@pytest.mark.parametrize(
    ("architecture", "why"),
    [
        ("NoSuchForCausalLM", "NoSuchForCausalLM is not in the model registry, and transformers does not have it"),
        ("BambaForCausalLM", "0.23.0 was the last release that had it"),
        ("BertModel", "BertModel is one of vLLM's embedding models: it answers no request of ours"),
        ("HunYuanForCausalLM", "HunYuanLayer returns hidden_states, residual, kv_states; a tap wants"),
        (
            "StreamsForCausalLM",
            "several residual streams, hidden_states.unsqueeze(-2).repeat(1, self.hc_mult, 1)",
        ),
    ],
)
def test_a_model_that_cannot_be_captured_is_refused_with_the_reason(
    architecture: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No transformers, which may have what vLLM lacks.
    monkeypatch.setattr("vllm_compat.doctor.capture.find_spec", lambda _: None)
    verdict = judge(tmp_path, config(architecture))
    assert verdict.decision.value is False
    assert verdict.decision.text.startswith("no, it cannot be captured here: ")
    assert why in verdict.decision.text
    with pytest.raises(UnsupportedModelError) as caught:
        verdict.require_capture()
    assert why in str(caught.value)


def test_the_layers_of_the_transformers_backend_are_not_in_the_source(tmp_path: Path) -> None:
    verdict = judge(tmp_path, config("NeoXForCausalLM"))
    assert verdict.decision.value is None
    assert verdict.decision.text.startswith(
        "not told: TransformersForCausalLM runs transformers' own layers, which can"
    )
    verdict.require_capture()
    served = "vllm.model_executor.models.transformers:TransformersForCausalLM"
    assert find(verdict.statements, "class").value == served
    decoder = find(verdict.statements, "decoder")
    assert (decoder.value, decoder.evidence) == (None, f"{MODELS}/transformers/base.py:5")


def test_a_base_of_several_classes_comes_after_the_last_of_them(tmp_path: Path) -> None:
    """As in Python's own order: else a protocol's empty method hides the one that a later base has."""
    installed = detect(write_tree(tmp_path)).installed
    assert installed
    source = Source(installed.package, "cpu")
    model = source.find_class("vllm.model_executor.models.transformers", "TransformersForCausalLM")
    assert model
    assert [c.name for c in source.lineage(model)] == ["TransformersForCausalLM", "CausalMixin", "Base", "VllmModel"]


def test_a_model_that_brings_its_own_code_may_run_in_the_transformers_backend(tmp_path: Path) -> None:
    verdict = judge(tmp_path, config("NoSuchForCausalLM", auto_map={"AutoModel": "x.Y"}))
    assert verdict.decision.value is None
    assert "vLLM's Transformers backend may serve it, and its layers can be captured" in verdict.decision.text
    verdict.require_capture()


def test_an_architecture_that_transformers_has_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = tmp_path / "site" / "transformers" / "models" / "auto" / "modeling_auto.py"
    listing.parent.mkdir(parents=True)
    listing.write_text('("mine", "MineForCausalLM")', encoding="utf-8")
    (tmp_path / "site" / "transformers" / "__init__.py").write_text("raise RuntimeError", encoding="utf-8")
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    monkeypatch.syspath_prepend(tmp_path / "site")
    mine = judge(tmp_path / "mine", config("MineForCausalLM"))
    assert (mine.decision.value, "vLLM's Transformers backend may serve it" in mine.decision.text) == (None, True)
    yours = judge(tmp_path / "yours", config("YoursForCausalLM"))
    assert (yours.decision.value, "this vLLM cannot serve it" in yours.decision.text) == (False, True)


def test_nothing_can_be_captured_where_no_adapter_fits(tmp_path: Path) -> None:
    lost = "vllm.v1.executor.abstract:Executor.get_class"
    verdict = judge(tmp_path, LLAMA_CONFIG, without=[lost])
    assert verdict.decision.value is False
    assert lost in verdict.decision.text


@pytest.mark.parametrize(
    ("version", "module"), [("0.99.0", "nvidia"), ("0.99.0+cpu", "cpu"), ("0.99.0+rocm700", "amd")]
)
def test_a_class_that_each_platform_has_is_that_of_the_build(version: str, module: str, tmp_path: Path) -> None:
    verdict = judge(tmp_path, config("NextForCausalLM"), version=version)
    assert find(verdict.statements, "class").value == f"vllm.models.next.{module}:NextForCausalLM"


@pytest.mark.parametrize(
    ("dispatch", "module"),
    [
        ("if TYPE_CHECKING:\n    from .amd import X\nelse:\n    from .nvidia import X", "nvidia"),
        ("if TYPE_CHECKING:\n    if current_platform.is_rocm():\n        from .amd import X\n"
         "    else:\n        from .nvidia import X", "nvidia"),
        ("if TYPE_CHECKING or not current_platform.is_rocm():\n    from .nvidia import X\n"
         "else:\n    from .amd import X", "nvidia"),
        ("if current_platform.device_type == 'tpu':\n    pass\nelif current_platform.is_cuda() and flag:\n"
         "    from .nvidia import X\nelse:\n    from .amd import X", "nvidia"),
        ("if flag:\n    from .amd import X", "amd"),
    ],
)  # fmt: skip
def test_ways_to_choose_by_platform(dispatch: str, module: str, tmp_path: Path) -> None:
    source = dispatch.replace("import X", "import NextForCausalLM")
    verdict = judge(tmp_path, config("NextForCausalLM"), add={"models/next/__init__": source})
    assert find(verdict.statements, "class").value == f"vllm.models.next.{module}:NextForCausalLM"


def test_a_layer_that_returns_a_tuple_by_name_may_be_captured(tmp_path: Path) -> None:
    by_name = DEEPSEEK.replace("return None, None", "return outputs")
    verdict = judge(tmp_path, config("DeepseekV3ForCausalLM"), add={f"{MODELS}/deepseek_v2": by_name})
    assert verdict.decision.value is True
    assert find(verdict.statements, "layer").value == "hidden_states, residual"
