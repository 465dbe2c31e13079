"""Models small enough for two CPU cores: one real, the others random with the shapes that matter."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
VOCAB = 512


def smollm2(folder: Path) -> Path:
    """SmolLM2-135M-Instruct, trained: 30 layers, hidden size 576."""
    sys.path.insert(0, str(ROOT / "demo"))
    import smollm2 as tool  # type: ignore[import-not-found]

    path: Path = tool.write_model(folder / "smollm2")
    return path


def _random(folder: Path, name: str, config: Any) -> Path:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    for parameter in model.parameters():
        # Init is so small that every layer is nearly the identity: an off-by-one would hardly show.
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.08)
    path = folder / name
    model.save_pretrained(path, safe_serialization=True)
    return path


_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def llama(folder: Path) -> Path:
    """6 layers, hidden size 128, two KV heads."""
    from transformers import LlamaConfig

    return _random(folder, "llama", LlamaConfig(**_COMMON, tie_word_embeddings=False))


def qwen3(folder: Path) -> Path:
    """As Llama, with normed queries and keys and a head size of its own."""
    from transformers import Qwen3Config

    return _random(folder, "qwen3", Qwen3Config(**_COMMON, head_dim=64))


def gemma(folder: Path) -> Path:
    """Embeddings multiplied by sqrt(hidden_size) and norms around 1: a re-implemented forward would miss both."""
    from transformers import GemmaConfig

    return _random(folder, "gemma", GemmaConfig(**_COMMON, head_dim=64))


def gpt2(folder: Path) -> Path:
    """Layers named ``h`` that return one tensor, not two summands; no rotary positions."""
    from transformers import GPT2Config

    config = GPT2Config(
        vocab_size=VOCAB, n_positions=1024, n_embd=128, n_layer=6, n_head=4, bos_token_id=1, eos_token_id=2
    )
    return _random(folder, "gpt2", config)


def helium(folder: Path) -> Path:
    """A class that vLLM lacks, and so leaves to HF's own layers in its Transformers backend."""
    from transformers import HeliumConfig

    return _random(folder, "helium", HeliumConfig(**_COMMON, head_dim=32))


def _deepseek_config() -> dict[str, Any]:
    return {
        **_COMMON,
        "num_key_value_heads": 4,
        "num_hidden_layers": 4,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 64,
        "kv_lora_rank": 512,  # this and 64 are the only MLA sizes of the CPU kernels
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
    }


def deepseek_v3(folder: Path) -> Path:
    """MLA and a mixture of experts: 4 layers, the first dense."""
    from transformers import DeepseekV3Config

    return _random(folder, "deepseek-v3", DeepseekV3Config(**_deepseek_config()))


_KIMI_PROCESSOR = '''"""Stands in for Kimi's image processor, which its own checkpoint brings as remote code."""

from transformers.image_processing_utils import BaseImageProcessor


class KimiStub(BaseImageProcessor):
    num_frames_per_chunk = 4

    def media_tokens_calculator(self, media):
        return 4

    def preprocess(self, *args, **kwargs):
        raise NotImplementedError("text only")
'''


def kimi_k25(folder: Path) -> Path:
    """The weights of ``deepseek_v3`` inside Kimi-K2.5's wrapper, beside a vision tower of as many layers.

    The oracle is ``deepseek_v3`` itself: HF has no Kimi-K2.5.
    """
    from safetensors.torch import load_file, save_file

    inner = deepseek_v3(folder)
    path = folder / "kimi-k25"
    path.mkdir(exist_ok=True)
    weights = load_file(inner / "model.safetensors")
    save_file({f"language_model.{k}": v for k, v in weights.items()}, path / "model.safetensors", {"format": "pt"})
    text = json.loads((inner / "config.json").read_text())
    vision = {
        "num_hidden_layers": text["num_hidden_layers"],
        "hidden_size": 64,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": text,
        "vision_config": vision,
        "media_placeholder_token_id": VOCAB - 1,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "kimi_stub.py").write_text(_KIMI_PROCESSOR)
    media = {
        "patch_size": 14,
        "merge_kernel_size": 2,
        "temporal_merge_kernel_size": 4,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "in_patch_limit": 1024,
        "in_patch_limit_each_frame": 256,
        "in_patch_limit_video": 1024,
        "patch_limit_on_one_side": 64,
        "fixed_output_tokens": None,
    }
    processor = {
        "auto_map": {"AutoImageProcessor": "kimi_stub.KimiStub"},
        "image_processor_type": "KimiStub",
        "media_proc_cfg": media,
    }
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    _tokenizer(path)
    return path


def kimi_int4(folder: Path) -> Path:
    """The text part of Kimi-K2.5 in its true shape but for the experts, 48 in place of 384: no weights, just a config.

    61 layers of hidden size 7168, MLA, experts INT4 in groups of 32 as its checkpoint has them; 123 GiB.
    """
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False}
    config = {
        **_deepseek_config(),
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 48,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "moe_layer_freq": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "vocab_size": 163840,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": [
                "lm_head",
                "re:.*self_attn.*",
                "re:.*shared_experts.*",
                "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            ],
        },
    }
    path = folder / "kimi-int4"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


def _tokenizer(path: Path) -> None:
    """A tokenizer of bytes: multimodal wrappers want one even for text that comes as token ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE({c: 3 + n for n, c in enumerate(alphabet)} | {"<pad>": 0, "<s>": 1, "</s>": 2}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
