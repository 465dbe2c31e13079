"""The self-check: the last states give the tokens that were sampled, by the checkpoint's own tensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.unit.verify.conftest import words

from vllm_compat.extract.journal import Entry
from vllm_compat.verify.problems import Problems

if TYPE_CHECKING:
    from tests.unit.verify.conftest import MakeRun, Verify

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers


@pytest.mark.parametrize(
    ("name", "norm", "head"),
    [
        ("llama", "rms", "lm_head.weight"),
        ("gemma", "rms_plus_one", "model.embed_tokens.weight"),
        ("gpt2", "layer", "transformer.wte.weight"),
        ("cohere", "layer", "model.embed_tokens.weight"),
    ],
)
def test_every_sample_agrees(model_run: MakeRun, check: Verify, name: str, norm: str, head: str) -> None:
    verdict = check(model_run(name, (4, 1, "norm")))
    assert words(verdict) == []
    last, normed = verdict.self_checks
    assert (last.layer_id, last.checked, last.exact, last.norm, last.head) == (4, 12, 12, norm, head)
    assert (normed.layer_id, normed.checked, normed.exact, normed.norm) == ("norm", 12, 12, "none")


def test_bfloat16_agrees_and_samples_may_be_fewer(model_run: MakeRun, check: Verify) -> None:
    folder = model_run("llama", (1, 4), rows=60, dtype="bfloat16")
    verdict = check(folder)
    assert verdict.exit_code == 0, words(verdict)
    assert verdict.self_checks[0].agree == verdict.self_checks[0].checked == 60
    assert check(folder, samples=5).self_checks[0].checked == 5


def test_every_token_of_an_answer_agrees(model_run: MakeRun, check: Verify) -> None:
    verdict = check(model_run("llama", (1, 4, "norm"), generate=6))
    assert verdict.exit_code == 0, words(verdict)
    assert [(result.checked, result.exact) for result in verdict.self_checks] == [(12 * 6, 12 * 6)] * 2


def test_one_wrong_state_in_the_middle_of_an_answer_is_named(model_run: MakeRun, check: Verify) -> None:
    """The state of the token before the last but one, of one sample; only its last was looked at once."""

    def rename(states: dict[Any, Any]) -> dict[Any, Any]:
        if len(states[4]) != longest:
            return states
        wrong = states["norm"].clone()
        wrong[-3] = wrong[0] - wrong[-3]
        return states | {"norm": wrong}

    folder = model_run("llama", (1, "norm"), generate=6)
    longest = max(json.loads(line)["tokens"] for line in _journal(folder))
    shutil.rmtree(folder)
    verdict = check(model_run("llama", (1, "norm"), rename, generate=6))
    assert verdict.exit_code == 5
    (problem,) = verdict.first
    assert f"self-check: by its state of token {longest - 3} at layer id norm the next token is" in problem.what
    (result,) = verdict.self_checks
    assert result.agree == result.checked - 1


def _journal(folder: Path) -> list[str]:
    return [line.partition(" ")[2] for line in (folder / "journal-0-of-1.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("layer_id", "other", "wanted"),
    [
        (4, "norm", "the last entry is post-norm, the run says pre-norm"),
        ("norm", 4, "the entry `norm` is pre-norm, or of another layer"),
    ],
)
@pytest.mark.parametrize("name", ["llama", "gemma", "gpt2"])
def test_the_wrong_side_of_the_norm_is_named(
    model_run: MakeRun, check: Verify, name: str, layer_id: Any, other: Any, wanted: str
) -> None:
    verdict = check(model_run(name, (1, layer_id), lambda s: s | {layer_id: s[other]}))
    assert verdict.exit_code == 5
    assert any(text.startswith(wanted) for text in _all(verdict))


def test_another_layer_in_the_last_ones_place_is_seen(model_run: MakeRun, check: Verify) -> None:
    verdict = check(model_run("llama", (1, 4), lambda s: s | {4: s[3]}))
    assert verdict.exit_code == 5
    (result,) = verdict.self_checks
    assert result.agree < result.checked == 12
    first = verdict.first[0]
    assert first.file == f"hs_{first.index}.safetensors"
    assert first.line == (1 if first.index == 0 else (first.index or 0) + 2)  # line 2 of the input is blank
    assert "vLLM sampled" in first.what


@pytest.mark.parametrize(
    ("layer_ids", "change", "why"),
    [
        ((1, 3), {}, "the run has neither the last layer, 4, nor `norm`"),
        ((1, 4), {"vocab_size": 300}, "the embedding is one tensor of 300 by 64, found none"),
        ((1, 4), {"rms_norm_eps": None}, "config.json has none of rms_norm_eps"),
        ((1, 4), {"tie_word_embeddings": False, "without": "lm_head.weight"}, "no lm_head is 256 by 64"),
        ((1, 4), {"without": "model.norm.weight"}, "the final norm is one tensor, found none"),
    ],
)
def test_where_it_cannot_be_done_it_says_why(
    model_run: MakeRun,
    save_model: Callable[[str], Path],
    check: Verify,
    tmp_path: Path,
    layer_ids: Any,
    change: dict[str, Any],
    why: str,
) -> None:
    from safetensors.torch import load_file, save_file

    folder = model_run("llama", layer_ids)
    other = tmp_path / "other"
    shutil.copytree(save_model("llama"), other)
    weights = load_file(other / "model.safetensors")
    weights.pop(change.pop("without", ""), None)
    save_file(weights, other / "model.safetensors")
    config = json.loads((other / "config.json").read_text()) | change
    (other / "config.json").write_text(json.dumps(config))
    verdict = _without_reference(check, folder, other)
    assert why in verdict.self_check_why_not
    assert verdict.self_checks == ()
    assert verdict.exit_code == 0


def test_a_model_of_another_revision_is_noted(
    model_run: MakeRun, save_model: Callable[[str], Path], check: Verify, tmp_path: Path
) -> None:
    folder = model_run("llama", (4,))
    other = tmp_path / "other"
    shutil.copytree(save_model("llama"), other)
    (other / "config.json").write_text((other / "config.json").read_text() + "\n")
    assert "is not the model of the run" in _without_reference(check, folder, other).notes[0]


@pytest.mark.parametrize("change", [{"hidden_size": 32}, {"vocab_size": 50}])
def test_of_another_model_nothing_is_said(
    model_run: MakeRun, save_model: Callable[[str], Path], check: Verify, tmp_path: Path, change: dict[str, int]
) -> None:
    import transformers

    folder = model_run("llama", (4, "norm"))
    config = transformers.AutoConfig.from_pretrained(save_model("llama"), **change)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "other")
    verdict = _without_reference(check, folder, tmp_path / "other")
    assert "the model is not the run's" in verdict.self_check_why_not
    assert verdict.self_checks == ()


def test_tensors_of_a_wrapper_are_found(model_run: MakeRun, save_model: Callable[[str], Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from vllm_compat.verify.checkpoint import Checkpoint
    from vllm_compat.verify.head import load_head

    other = tmp_path / "wrapper"
    other.mkdir()
    weights = {f"language_model.{name}": tensor for name, tensor in load_file(_weights(save_model("llama"))).items()}
    weights["vision_tower.encoder.final_layernorm.weight"] = torch.ones(64)
    weights["language_model.model.layers.5.shared_head.norm.weight"] = torch.ones(64)
    weights["language_model.model.layers.5.shared_head.head.weight"] = torch.ones(256, 64)
    names = sorted(weights)
    for part in (0, 1):
        save_file({name: weights[name] for name in names[part::2]}, other / f"model-{part}.safetensors")
    places = {name: f"model-{at % 2}.safetensors" for at, name in enumerate(names)}
    (other / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    config = json.loads((save_model("llama") / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({"model_type": "wrapper", "text_config": config}))
    head = load_head(Checkpoint(other), "cpu")
    assert head.name == "language_model.lm_head.weight"
    assert torch.equal(head.norms[0].weight, weights["language_model.model.norm.weight"])


def test_a_tie_in_bfloat16_agrees_and_is_counted_apart() -> None:
    result, problems = _on_numbers([[1.0, 0.0], [1.0, 1e-3], [1.0, 0.1], [0.0, 1.0]], sampled=[0, 1, 2, 3])
    # Logits 1, 1.001, 1.1, 1 of the state (1, 1): two of four are within rounding of the largest.
    assert (result.checked, result.exact, result.tied) == (4, 1, 0)
    assert problems.count == 3
    result, problems = _on_numbers([[100.0, 1.0], [100.0, 1.1], [100.0, 1.3], [90.0, 1.0]], sampled=[0, 1, 2, 3])
    assert (result.exact, result.tied, problems.count) == (1, 2, 1)
    assert problems.first[0].index == 3


def test_a_soft_cap_widens_what_rounding_can_do() -> None:
    from vllm_compat.verify.selfcheck import _widening

    assert _widening(torch.tensor([0.01]), 30.0).item() == pytest.approx(4.0, rel=0.01)
    assert _widening(torch.tensor([60.0]), 30.0).item() > 10


def _on_numbers(rows: list[list[float]], sampled: list[int]) -> Any:
    from vllm_compat.convert.norm import FinalNorm
    from vllm_compat.verify.head import Head
    from vllm_compat.verify.sample import Checked
    from vllm_compat.verify.selfcheck import End, SelfCheck

    problems = Problems(len(sampled))
    norm = FinalNorm("rms", 0.0, torch.ones(2), None)
    head = Head("lm_head.weight", torch.tensor(rows), None, (norm,), None)
    check = SelfCheck(head, End("norm", 0, 0), "auto", problems)
    for index, token in enumerate(sampled):
        entry = Entry(index, f"hs_{index}.safetensors", 1, "", 1, token)
        check.add(Checked(entry, index + 1, (), 1, 2, "bfloat16", (token,), 0, (torch.ones(1, 2),)))
    return check.finish(), problems


def _weights(folder: Path) -> Path:
    return folder / "model.safetensors"


def _without_reference(check: Verify, folder: Path, model: Path) -> Any:
    """A verdict with the run's own model replaced, and nothing computed again."""
    record = json.loads((folder / "run.json").read_text())
    record["identity"]["model"] = str(model)
    (folder / "run.json").write_text(json.dumps(record))
    return check(folder)


def _all(verdict: Any) -> list[str]:
    return [problem.what for problem in verdict.first]
