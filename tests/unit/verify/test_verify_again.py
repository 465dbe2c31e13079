"""Samples that HF transformers computes again: right states pass, others are called by their name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.unit.verify.conftest import words

if TYPE_CHECKING:
    from tests.unit.verify.conftest import MakeRun, Verify

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers

Rename = Callable[[dict[Any, Any]], dict[Any, Any]]


@pytest.mark.parametrize("name", ["llama", "gemma", "gpt2", "cohere"])
def test_right_states_are_within_1e_5_in_float32(
    model_run: MakeRun, save_model: Callable[[str], Path], check: Verify, name: str
) -> None:
    folder = model_run(name, (1, 3, 4, "norm"))
    verdict = check(folder, model=str(save_model(name)), samples=3)
    assert words(verdict) == []
    assert verdict.exit_code == 0
    assert verdict.recomputed is not None
    assert len(verdict.recomputed.samples) == 3
    assert [layer.layer_id for layer in verdict.recomputed.layers] == [1, 3, 4, "norm"]
    assert all(layer.ours.worst < 1e-5 for layer in verdict.recomputed.layers)
    assert all(layer.nearest_error > 0.01 for layer in verdict.recomputed.layers)


def test_bfloat16_is_bound_by_what_bfloat16_has(
    model_run: MakeRun, save_model: Callable[[str], Path], check: Verify
) -> None:
    folder = model_run("llama", (1, 4), dtype="bfloat16")
    verdict = check(folder, model=str(save_model("llama")))
    assert verdict.exit_code == 0, words(verdict)
    assert verdict.recomputed is not None
    for layer in verdict.recomputed.layers:
        assert 1e-3 < layer.ours.typical <= layer.bound == 2 * layer.noise.typical
        assert layer.looks_like == ()
    assert check(folder, model=str(save_model("llama")), bound=1e-4).exit_code == 5


@pytest.mark.parametrize(
    ("layer_ids", "rename", "wanted"),
    [
        ((1, 3), lambda s: s | {3: s[2]}, ["layer 3 matches layer 2"]),
        ((1, 3), lambda s: s | {1: s[2], 3: s[4]}, ["layer 1 matches layer 2", "layer 3 matches layer 4"]),
        ((1, 3), lambda s: s | {1: s[3], 3: s[1]}, ["layer 1 matches layer 3", "layer 3 matches layer 1"]),
        ((1, 4), lambda s: s | {4: s["norm"]}, ["the last entry is post-norm, the run says pre-norm"]),
        ((1, "norm"), lambda s: s | {"norm": s[4]}, ["the last entry is pre-norm, the run says post-norm"]),
        ((1, 3), lambda s: s | {3: -s[3]}, ["layer 3 matches no layer of the model"]),
    ],
)
def test_wrong_states_are_called_by_their_name(
    model_run: MakeRun,
    save_model: Callable[[str], Path],
    check: Verify,
    layer_ids: tuple[Any, ...],
    rename: Rename,
    wanted: list[str],
) -> None:
    verdict = check(model_run("llama", layer_ids, rename), model=str(save_model("llama")))
    assert verdict.exit_code == 5
    again = [text for text in words(verdict) if text.startswith("computed again")]
    assert len(again) == len(wanted)
    for text, part in zip(again, wanted, strict=True):
        assert part in text


def test_a_damaged_sample_is_left_out(model_run: MakeRun, save_model: Callable[[str], Path], check: Verify) -> None:
    folder = model_run("llama", (1, 4), rows=3)
    (folder / "hs_1.safetensors").unlink()
    verdict = check(folder, model=str(save_model("llama")))
    assert verdict.recomputed is not None
    assert verdict.recomputed.samples == (0, 2)
    assert words(verdict) == ["sample 1, line 3 of the input, hs_1.safetensors: the file is gone"]


def test_without_a_class_in_transformers_the_self_check_stands_alone(
    model_run: MakeRun, save_model: Callable[[str], Path], check: Verify, tmp_path: Path
) -> None:
    folder = model_run("gemma", (1, 4))
    other = tmp_path / "other"
    shutil.copytree(save_model("gemma"), other)
    config = json.loads((other / "config.json").read_text()) | {"model_type": "of_tomorrow", "architectures": ["New"]}
    (other / "config.json").write_text(json.dumps(config))
    verdict = check(folder, model=str(other))
    assert "of_tomorrow" in verdict.recomputed_why_not
    assert verdict.self_checks[0].agree == 12
    assert verdict.self_checks[0].norm == "rms_plus_one"
    assert verdict.exit_code == 0
    shutil.rmtree(other)
    assert check(folder, model=str(other)).exit_code == 4


def test_a_model_without_some_weights_is_no_reference(
    model_run: MakeRun, save_model: Callable[[str], Path], check: Verify, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    other = tmp_path / "other"
    shutil.copytree(save_model("llama"), other)
    weights = load_file(other / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    verdict = check(model_run("llama", (1, 4)), model=str(other))
    assert "no weights for 1 tensors" in verdict.recomputed_why_not


def test_another_model_is_no_reference(
    model_run: MakeRun, save_model: Callable[[str], Path], check: Verify, tmp_path: Path
) -> None:
    import transformers

    folder = model_run("llama", (1, 4))
    config = transformers.AutoConfig.from_pretrained(save_model("llama"), num_hidden_layers=3)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "other")
    verdict = check(folder, model=str(tmp_path / "other"))
    assert "the model has no layer 4, only 0 to 2" in verdict.recomputed_why_not


def test_float8_is_bound_by_what_float8_leaves(
    model_run: MakeRun, save_model: Callable[[str], Path], check: Verify
) -> None:
    pytest.importorskip("datasets")
    folder = model_run("llama", (0, 2, 3, 4), dtype="bfloat16", format="speculators-fp8")
    verdict = check(folder, model=str(save_model("llama")))
    assert words(verdict) == []
    assert verdict.exit_code == 0
    assert verdict.recomputed is not None
    assert all(0.015 < layer.ours.typical <= layer.bound for layer in verdict.recomputed.layers)
    assert verdict.self_checks[0].agree == 12
