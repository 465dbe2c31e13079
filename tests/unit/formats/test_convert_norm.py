"""The final norm from a checkpoint: HF's own, bit by bit, for every type of model that is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.formats.conftest import HIDDEN, MakeRun, N

from vllm_compat.convert import ConvertConfig, convert
from vllm_compat.convert.norm import KNOWN, load_final_norm
from vllm_compat.errors import UsageError
from vllm_compat.extract.done import SealedEntries
from vllm_compat.formats import get_format
from vllm_compat.types import LayerId

torch: Any = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers'

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_model(model_type: str, dtype: Any) -> Any:
    """A model of random weights, its final norm's not near 1."""
    transformers = pytest.importorskip("transformers")
    try:
        default = transformers.AutoConfig.for_model(model_type)
    except ValueError:
        pytest.skip(f"this transformers has no {model_type}")
    sizes = {name: value for name, value in SIZES.items() if hasattr(default, name)}
    if "qk_rope_head_dim" in sizes:
        sizes.pop("head_dim", None)  # it follows from that
    if hasattr(default, "layer_types"):
        sizes["layer_types"] = ["full_attention"] * 2
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in norm_of(model).parameters():
            parameter.normal_(1.0, 0.5)
    return model.to(dtype)


def norm_of(model: Any) -> Any:
    inner = getattr(model, "model", model.base_model)
    return inner.final_layer_norm if hasattr(inner, "final_layer_norm") else inner.norm


def in_and_out(model: Any) -> tuple[Any, Any]:
    """The states before and after the final norm, of the model's own forward pass."""
    seen: list[Any] = []
    hook = norm_of(model).register_forward_hook(lambda _, given, made: seen.append((given[0], made)))
    with torch.no_grad():
        model(torch.arange(3, 20)[None] % 64)
    hook.remove()
    before, after = seen[0]
    return before[0], after[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("model_type", KNOWN)
def test_it_is_transformers_own(model_type: str, dtype: str, tmp_path: Path) -> None:
    model = tiny_model(model_type, getattr(torch, dtype))
    model.save_pretrained(tmp_path)
    before, after = in_and_out(model)
    assert before.dtype == getattr(torch, dtype)
    assert not torch.allclose(before, after, rtol=0.1), "the norm does something"
    assert torch.equal(load_final_norm(str(tmp_path))(before), after)


def test_in_several_files_and_below_a_wrapper(tmp_path: Path) -> None:
    """As Kimi-K2.5 has it: the text model's names have a prefix, its configuration is nested."""
    from safetensors.torch import save_file

    model = tiny_model("deepseek_v3", torch.bfloat16)
    before, after = in_and_out(model)
    weights = {f"language_model.{name}": tensor for name, tensor in model.state_dict().items()}
    places = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(weights)}
    for file in set(places.values()):
        chosen = {name: tensor.clone() for name, tensor in weights.items() if places[name] == file}
        save_file(chosen, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    text = model.config.to_dict() | {"model_type": "kimi_k2"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": text}))
    assert torch.equal(load_final_norm(str(tmp_path))(before), after)


def write_checkpoint(folder: Path, width: int = HIDDEN, **changes: Any) -> Any:
    """The least that is a Llama with a final norm; returns its weight."""
    from safetensors.torch import save_file

    weight = torch.linspace(0.5, 2, width).to(torch.bfloat16)
    save_file({"model.norm.weight": weight}, folder / "model.safetensors")
    config = {"model_type": "llama", "rms_norm_eps": 1e-5, "num_hidden_layers": N, "hidden_size": HIDDEN}
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096} | changes))
    return weight


@pytest.mark.parametrize("name", ["specforge", "eagle", "speculators-v1"])
def test_a_run_that_has_the_last_layer_only(make_run: MakeRun, tmp_path: Path, model: Path, name: str) -> None:
    weight = write_checkpoint(model)
    run, out = make_run((1, 4, 5, 7)), tmp_path / "there"
    ids: tuple[LayerId, ...] = ("norm",) if name == "eagle" else (1, 4, 5, "norm")
    convert(ConvertConfig(run, out, name, ids, model=str(model)))
    for left, right in zip(SealedEntries(run, 12), SealedEntries(out, 12), strict=True):
        had = get_format("safetensors").decode(run / left.file, left.index)
        got = get_format(name).decode(out / right.file, right.index)
        last = had.hidden_states[:, 3].float()
        wanted = last * torch.rsqrt(last.pow(2).mean(-1, keepdim=True) + 1e-5)
        assert torch.equal(got.hidden_states[:, -1], weight * wanted.to(torch.bfloat16))
        assert torch.equal(got.hidden_states[:, :-1], had.hidden_states[:, : len(ids) - 1])
        assert "norm_computed" in got.metadata
        assert json.loads(got.metadata["post_norm"]) == [k == "norm" for k in ids]


def test_both_states_and_the_source_is_left_alone(make_run: MakeRun, tmp_path: Path, model: Path) -> None:
    write_checkpoint(model)
    run, out = make_run((7,)), tmp_path / "there"
    before = {path.name: path.read_bytes() for path in run.glob("hs_*")}
    convert(ConvertConfig(run, out, "safetensors", ("norm", 7), model=str(model)))
    assert {path.name: path.read_bytes() for path in run.glob("hs_*")} == before
    had, data = (get_format("safetensors").decode(folder / "hs_0.safetensors", 0) for folder in (run, out))
    assert torch.equal(data.hidden_states[:, 1], had.hidden_states[:, 0])
    assert not torch.equal(data.hidden_states[:, 0], data.hidden_states[:, 1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "plamo"}, "model type 'plamo' works is not known. Extract the state itself: --layer-ids"),
        ({"rms_norm_eps": None}, "rms_norm_eps is None, not a number"),
        ({"model_type": "gpt_neox", "layer_norm_eps": 1e-5}, "0 tensors could be the final norm's weight"),
    ],
)
def test_a_norm_that_is_not_known(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_checkpoint(tmp_path, **changes)
    with pytest.raises(UsageError, match=message):
        load_final_norm(str(tmp_path))


def test_no_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"config\.json cannot be read.*--model wants a model's folder"):
        load_final_norm(str(tmp_path))


def test_no_weights(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="no weights in safetensors that can be read"):
        load_final_norm(str(tmp_path))


def test_another_model_than_the_runs(make_run: MakeRun, tmp_path: Path, model: Path) -> None:
    write_checkpoint(model)
    run = make_run((1, 7))
    other = tmp_path / "other"
    other.mkdir()
    write_checkpoint(other, rope_theta=1.0)
    with pytest.raises(UsageError, match=r"other is revision xxh3:.*the run was made with xxh3:"):
        convert(ConvertConfig(run, tmp_path / "there", "safetensors", ("norm",), model=str(other)))
    assert not (tmp_path / "there").exists()


def test_a_model_of_another_width(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, width=16)
    with pytest.raises(UsageError, match="the model is 16 wide, the states are 8"):
        load_final_norm(str(tmp_path))(torch.zeros(1, 8))
